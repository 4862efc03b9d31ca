// The kernel table of the GPUs.
#include "cuda/detail/kernels.h"

namespace voxgrad {

const Kernels& cuda_kernels() {
  namespace kernel = cuda::kernel;
  static constexpr Kernels table{
      .copy = kernel::copy,
      .fill = kernel::fill,
      .arange = kernel::arange,
      .unary = kernel::unary,
      .binary = kernel::binary,
      .where = kernel::where,
      .uniform = kernel::uniform,
      .normal = kernel::normal,
      .reduce = kernel::reduce,
      .softmax = kernel::softmax,
      .cumsum = kernel::cumsum,
      .argmax = kernel::argmax,
      .sort = kernel::sort,
      .matmul = kernel::matmul,
      .conv_forward = kernel::conv_forward,
      .conv_backward_data = kernel::conv_backward_data,
      .conv_backward_weight = kernel::conv_backward_weight,
      .explain_conv = kernel::explain_conv,
      .class_sums = kernel::class_sums,
      .class_sums_backward = kernel::class_sums_backward,
      .group_norm = kernel::group_norm,
      .normalize = kernel::normalize,
      .group_norm_backward = kernel::group_norm_backward,
      .track_statistics = kernel::track_statistics,
      .prelu = kernel::prelu,
      .prelu_backward = kernel::prelu_backward,
      .relu_bias_backward = kernel::relu_bias_backward,
      .max_pool = kernel::max_pool,
      .max_pool_backward = kernel::max_pool_backward,
      .resample = kernel::resample,
      .grid_sample = kernel::grid_sample,
      .grid_sample_backward = kernel::grid_sample_backward,
      .gather = kernel::gather,
      .scatter_add = kernel::scatter_add,
      .step = kernel::step,
      .sum_of_squares = kernel::sum_of_squares,
  };
  return table;
}

}  // namespace voxgrad
