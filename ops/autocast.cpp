#include "ops/detail/autocast.h"

#include <string_view>
#include <unordered_map>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/capture.h"
#include "ops/detail/kernels.h"

namespace voxgrad {
namespace {

// ---- the table, that of torch.autocast but for what is said below

/// In the guard's dtype: products, whose sums the kernels form in float32.
constexpr std::string_view kLow[] = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "matmul", "linear", "prelu",
};

/// In float32: what overflows or cancels in halves, sums that are results, and losses.
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

// In the widest dtype of the operands, with or without autocast: arithmetic, comparisons, maximum, where, cat and
// stack promote (result_type in ops/elementwise.h).
//
// In the dtype of the input, because the kernels compute in float32 or double and round once: normalisation (its
// parameters stay float32 beside halves; its statistics are never halves), activations, softplus among them, pooling,
// resampling, sampling (of halves by an f32 grid), dropout, mean and var; PyTorch has the norms, softplus and
// resampling in float32. cross_entropy and dice_loss read halves and give float32.

enum class Cast : uint8_t { low, float32 };

const std::unordered_map<std::string_view, Cast>& rows() {
  static const auto table = [] {
    std::unordered_map<std::string_view, Cast> map;
    for (const std::string_view op : kLow) map.emplace(op, Cast::low);
    for (const std::string_view op : kFloat32) map.emplace(op, Cast::float32);
    return map;
  }();
  return table;
}

/// The values of a leaf in another dtype, made once for each version of its elements. A captured graph makes its own,
/// which its replays make anew.
Tensor converted_leaf(const Tensor& x, DType dtype) {
  AutogradData& data = *x.body()->autograd;
  const Capture* capture = Capture::current();
  const uint64_t place = capture && capture->device() == x.device() ? capture->id() : 0;
  const std::lock_guard lock(data.mutex);
  AutogradData::Converted& kept = data.converted;
  const bool fresh = kept.values.defined() && kept.values.dtype() == dtype && kept.capture == place &&
                     kept.source.lock() == x.storage() && kept.version == x.storage()->version();
  if (!fresh) {
    Tensor values = empty_strided(x.shape(), empty_like_strides(x), {dtype, x.device()});
    kernels(x.device()).copy(values.view_out(), x.view_in());
    kept = {std::move(values), x.storage(), x.storage()->version(), place};
  }
  return kept.values;
}

}  // namespace

Tensor autocasted(const char* op, const Tensor& x) {
  const auto low = autocast::dtype();
  if (!low || !x.defined() || !is_floating(x.dtype()) || x.dtype() == f64) return x;
  const auto row = rows().find(op);
  if (row == rows().end()) return x;
  const DType dtype = row->second == Cast::low ? *low : f32;
  if (x.dtype() == dtype || x.dtype() != f32 || !x.is_leaf() || !x.requires_grad()) return x.to(dtype);
  return record("to", converted_leaf(x, dtype).detach(), {x}, [](const Tensor& g) { return Tensors{g.to(f32)}; });
}

DType autocasted_result(const Tensor& input) { return autocast::dtype() && input.dtype() != f64 ? f32 : input.dtype(); }

}  // namespace voxgrad
