// The CPU's kernels, entry by entry.
#include "ops/cpu/kernels.h"

namespace voxgrad {

const Kernels& cpu_kernels() {
  static constexpr Kernels table{
      .copy = cpu::copy,
      .fill = cpu::fill,
      .arange = cpu::arange,
      .unary = cpu::unary,
      .binary = cpu::binary,
      .where = cpu::where,
      .uniform = cpu::uniform,
      .normal = cpu::normal,
      .reduce = cpu::reduce,
      .softmax = cpu::softmax,
      .cumsum = cpu::cumsum,
      .argmax = cpu::argmax,
      .sort = cpu::sort,
      .matmul = cpu::matmul,
      .conv_forward = cpu::conv_forward,
      .conv_backward_data = cpu::conv_backward_data,
      .conv_backward_weight = cpu::conv_backward_weight,
      .explain_conv = cpu::explain_conv,
      .class_sums = cpu::class_sums,
      .class_sums_backward = cpu::class_sums_backward,
      .group_norm = cpu::group_norm,
      .normalize = cpu::normalize,
      .group_norm_backward = cpu::group_norm_backward,
      .track_statistics = cpu::track_statistics,
      .prelu = cpu::prelu,
      .prelu_backward = cpu::prelu_backward,
      .relu_bias_backward = cpu::relu_bias_backward,
      .max_pool = cpu::max_pool,
      .max_pool_backward = cpu::max_pool_backward,
      .resample = cpu::resample,
      .grid_sample = cpu::grid_sample,
      .grid_sample_backward = cpu::grid_sample_backward,
      .gather = cpu::gather,
      .scatter_add = cpu::scatter_add,
      .step = cpu::step,
      .sum_of_squares = cpu::sum_of_squares,
  };
  return table;
}

}  // namespace voxgrad
