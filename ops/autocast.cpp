// The operators that convert their operands under autocast, and the conversion.
#include "ops/detail/common.h"

#include <algorithm>
#include <string_view>

#include "core/autocast.h"
#include "core/capture.h"

namespace voxgrad {
namespace {

// ---- Lists of the operators that convert their operands. The comment after the lists names the differences from
// torch.autocast.

/// Operators that compute in the autocast dtype, as in PyTorch. The kernels of matrix products and convolutions sum in
/// float32.
constexpr std::string_view kLow[] = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "matmul", "linear", "prelu",
};

/// Operators that compute in float32: functions that overflow or lose precision in bf16 or f16, sums, and losses.
constexpr std::string_view kFloat32[] = {
    "exp",
    "log",
    "pow",
    "reciprocal",
    "rsqrt",
    "logsumexp",
    "softmax",
    "log_softmax",
    "sum",
    "prod",
    "cumsum",
    "norm",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "binary_cross_entropy_with_logits",
    "nll_loss",
    "kl_div",
};

// Other operators do not convert their operands:
// - Arithmetic, comparisons, maximum, where, cat and stack promote to the widest dtype of the operands, with or without
//   autocast (result_type in ops/elementwise.h).
// - Normalization, activations including softplus, pooling, resampling, grid_sample, dropout, mean and var return the
//   dtype of the input, because their kernels compute in float32 or double and round once. Parameters and statistics of
//   norms stay float32. The grid of grid_sample may stay float32, too. In contrast, torch.autocast converts the inputs
//   of norms, softplus and resampling to float32.
// - cross_entropy and dice_loss read bf16 and f16 directly and return float32.

/// Returns the values of a leaf tensor, converted to another dtype. The converted copy is cached until the elements of
/// the leaf change. While a CUDA graph is captured, the graph gets a separate copy, and every replay of the graph
/// repeats the conversion.
Tensor converted_leaf(const Tensor& x, DType dtype) {
  AutogradData& data = *x.body()->autograd;
  const Capture* capture = Capture::current();
  const uint64_t capture_id = capture && capture->device() == x.device() ? capture->id() : 0;
  const std::lock_guard lock(data.mutex);
  AutogradData::Converted& cached = data.converted;
  const bool fresh = cached.values.defined() && cached.values.dtype() == dtype && cached.capture == capture_id &&
                     cached.source.lock() == x.storage() && cached.version == x.storage()->version();
  if (!fresh) {
    Tensor values = empty_strided(x.shape(), empty_like_strides(x), {dtype, x.device()});
    kernels(x.device()).copy(values.view_out(), x.view_in());
    cached = {std::move(values), x.storage(), x.storage()->version(), capture_id};
  }
  return cached.values;
}

}  // namespace

Tensor autocasted(const char* op, const Tensor& x) {
  const auto low = autocast::dtype();
  if (!low || !x.defined() || !is_floating(x.dtype()) || x.dtype() == f64) return x;
  const auto is_in = [op](const auto& list) { return std::ranges::find(list, op) != std::end(list); };
  const bool is_low = is_in(kLow);
  if (!is_low && !is_in(kFloat32)) return x;
  const DType dtype = is_low ? *low : f32;
  if (x.dtype() == dtype || x.dtype() != f32 || !x.is_leaf() || !x.requires_grad()) return x.to(dtype);
  return record("to", converted_leaf(x, dtype).detach(), {x}, [](const Tensor& g) { return Tensors{g.to(f32)}; });
}

DType autocasted_result(const Tensor& input) { return autocast::dtype() && input.dtype() != f64 ? f32 : input.dtype(); }

}  // namespace voxgrad
