// Encodes TMA tensor maps.
#include "cuda/conv/common/tensor_map.h"

#include <cuda_runtime.h>

#include "core/detail/divide.h"
#include "core/error.h"
#include "cuda/detail/kernels.h"
#include "cuda/detail/launch.h"

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
  check(encode, op, "the CUDA driver does not provide cuTensorMapEncodeTiled");
  return encode;
}

}  // namespace

TmaTensor::TmaTensor(const View& view, const Launch& launch) : view_(view) {
  if (is_tma_tensor(view)) return;
  const int64_t elements = lay_out(view_, {1, 4, 3, 2, 0});
  copy_.emplace(launch, static_cast<size_t>(elements * item_size(view.dtype)));
  view_.data = copy_->as<void>();
  kernel::copy(view_, view);
}

CUtensorMap describe(const SwizzledTensor& tensor, const char* op) {
  const CUtensorMapDataType type = tensor.dtype == DType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : tensor.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : tensor.row_bytes == 0      ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                                : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const CUtensorMapSwizzle swizzle = tensor.row_bytes == 0     ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : tensor.row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : tensor.row_bytes == 64  ? CU_TENSOR_MAP_SWIZZLE_64B
                                                               : CU_TENSOR_MAP_SWIZZLE_32B;
  cuuint64_t sizes[5], strides[5];
  cuuint32_t box[5], steps[5];
  for (int a = 0; a < tensor.rank; ++a) {
    sizes[a] = static_cast<cuuint64_t>(tensor.size[a]);
    box[a] = static_cast<cuuint32_t>((tensor.box[a] - 1) * tensor.step[a] + 1);
    steps[a] = static_cast<cuuint32_t>(tensor.step[a]);
    // An axis with one element may have a stride that TMA would reject. TMA does not use this stride.
    const int64_t stride = tensor.size[a] == 1 ? 16 : tensor.stride[a] * static_cast<int64_t>(item_size(tensor.dtype));
    if (a > 0) strides[a - 1] = static_cast<cuuint64_t>(stride);
  }
  // A row of 64 bytes can be half a voxel, whose other half may be evicted from L2 before it is read. Rows of 32 bytes
  // were not measured.
  const CUtensorMapL2promotion promotion =
      tensor.row_bytes == 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  CUtensorMap map;
  const CUresult status =
      encoder(op)(&map, type, static_cast<cuuint32_t>(tensor.rank), tensor.data, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, op, "cuTensorMapEncodeTiled rejected boxes of ", tensor.box[0], " channels x ",
        tensor.box[1], " x ", tensor.box[2], " of a tensor of ", tensor.size[0], " x ", tensor.size[1], " x ",
        tensor.size[2], ": CUresult ", static_cast<int>(status));
  return map;
}

CUtensorMap describe_voxels(const View& v, int channels, const int (&box)[4], const int (&in_step)[3], const char* op,
                            bool swizzled) {
  return describe(SwizzledTensor{.data = v.data,
                                 .dtype = v.dtype,
                                 .size = {v.size[1], v.size[4], v.size[3], v.size[2], v.size[0]},
                                 .stride = {1, v.stride[4], v.stride[3], v.stride[2], v.stride[0]},
                                 .box = {channels, box[3], box[2], box[1], box[0]},
                                 .step = {1, in_step[2], in_step[1], in_step[0], 1},
                                 .row_bytes = swizzled ? channels * static_cast<int>(item_size(v.dtype)) : 0,
                                 .rank = 5},
                  op);
}

}  // namespace voxgrad::cuda
