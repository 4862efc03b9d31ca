#include "cuda/conv/tensor_map.h"

#include <cuda_runtime.h>

#include "core/error.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

namespace {

auto encoder(const char* op) {
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
  check(encode, op, "the driver does not know tensor maps");
  return encode;
}

}  // namespace

CUtensorMap describe(const SwizzledTensor& tensor, const char* op) {
  const CUtensorMapDataType type = tensor.dtype == DType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : tensor.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const CUtensorMapSwizzle swizzle = tensor.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : tensor.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                              : CU_TENSOR_MAP_SWIZZLE_32B;
  cuuint64_t sizes[5], strides[5];
  cuuint32_t box[5], steps[5];
  for (int a = 0; a < tensor.rank; ++a) {
    sizes[a] = static_cast<cuuint64_t>(tensor.size[a]);
    box[a] = static_cast<cuuint32_t>((tensor.box[a] - 1) * tensor.step[a] + 1);
    steps[a] = static_cast<cuuint32_t>(tensor.step[a]);
    // Of an axis of one element it may be anything, which TMA need not like.
    const int64_t stride = tensor.size[a] == 1 ? 16 : tensor.stride[a] * static_cast<int64_t>(item_size(tensor.dtype));
    if (a > 0) strides[a - 1] = static_cast<cuuint64_t>(stride);
  }
  CUtensorMap map;
  const CUresult status = encoder(op)(&map, type, static_cast<cuuint32_t>(tensor.rank), tensor.data, sizes, strides,
                                      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, op, "the driver does not describe boxes of ", tensor.box[0], " channels x ",
        tensor.box[1], " x ", tensor.box[2], " of a tensor of ", tensor.size[0], " x ", tensor.size[1], " x ",
        tensor.size[2], " to its copy engine: CUresult ", static_cast<int>(status));
  return map;
}

CUtensorMap describe(const PackedTensor& tensor, const char* op) {
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
  const CUresult status = encoder(op)(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 4, tensor.data, sizes, strides, box, steps,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, op, "the driver does not describe boxes of ", tensor.box[0], " x ", tensor.box[1],
        " x ", tensor.box[2], " x ", tensor.box[3], " of packed inputs of ", tensor.size[0], " x ", tensor.size[1],
        " x ", tensor.size[2], " x ", tensor.size[3], " voxels to its copy engine: CUresult ",
        static_cast<int>(status));
  return map;
}

}  // namespace voxgrad::cuda
