#include "cuda/conv/tensor_map.h"

#include <cuda_runtime.h>

#include "core/error.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

CUtensorMap describe(const PackedTensor& tensor, const char* op) {
  static const auto encode = [&] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
               op);
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result), op);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int a = 0; a < 4; ++a) {
    const int elements = a == 0 ? 2 : 1;  // of a voxel: there are none of 16 bytes
    sizes[a] = static_cast<cuuint64_t>(tensor.size[a] * elements);
    box[a] = static_cast<cuuint32_t>(((tensor.box[a] - 1) * tensor.step[a] + 1) * elements);
    steps[a] = static_cast<cuuint32_t>(tensor.step[a]);
    if (a > 0) strides[a - 1] = static_cast<cuuint64_t>(tensor.stride[a]);
  }
  CUtensorMap map;
  const CUresult status = encode ? encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 4, tensor.data, sizes, strides, box,
                                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
                                 : CUDA_ERROR_NOT_FOUND;
  check(status == CUDA_SUCCESS, op, "the driver does not describe boxes of ", tensor.box[0], " x ", tensor.box[1],
        " x ", tensor.box[2], " x ", tensor.box[3], " of packed inputs of ", tensor.size[0], " x ", tensor.size[1],
        " x ", tensor.size[2], " x ", tensor.size[3], " voxels to its copy engine: CUresult ",
        static_cast<int>(status));
  return map;
}

}  // namespace voxgrad::cuda
