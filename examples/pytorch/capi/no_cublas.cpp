// Definitions of the cuBLAS functions that voxgrad's matrix product calls. The C interface has no matrix product. With
// these definitions, the library of the C interface does not depend on libcublas, whose version may differ from the
// version that a framework in the same process uses.
#include <cublas_v2.h>

cublasStatus_t cublasCreate_v2(cublasHandle_t*) { return CUBLAS_STATUS_NOT_SUPPORTED; }
cublasStatus_t cublasDestroy_v2(cublasHandle_t) { return CUBLAS_STATUS_NOT_SUPPORTED; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_NOT_SUPPORTED; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_NOT_SUPPORTED; }
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_NOT_SUPPORTED; }
const char* cublasGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS_NOT_SUPPORTED"; }
const char* cublasGetStatusString(cublasStatus_t) { return "this library has no cuBLAS"; }
cublasStatus_t cublasGemmStridedBatchedEx_64(cublasHandle_t, cublasOperation_t, cublasOperation_t, int64_t, int64_t,
                                             int64_t, const void*, const void*, cudaDataType, int64_t, long long int,
                                             const void*, cudaDataType, int64_t, long long int, const void*, void*,
                                             cudaDataType, int64_t, long long int, int64_t, cublasComputeType_t,
                                             cublasGemmAlgo_t) {
  return CUBLAS_STATUS_NOT_SUPPORTED;
}
