// Loss functions.
//
// Losses of an input and a target of equal shape are composed of elementwise operators and a reduction. Classification
// losses are computed from five sums over the voxels of each class. One kernel computes the sums in one pass over the
// logits, and another kernel computes the gradient of the logits. The loss is composed of operators on the sums, in
// double.
//
// If there are more than kMaxClasses classes or the target holds probabilities, the Dice losses compute the sums with
// differentiable operators. cross_entropy and nll_loss compute the loss of each voxel with operators, without the sums,
// in four cases: these two cases, (N, C) inputs, and Reduction::none.
#include "ops/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// The checked input and target, with bf16 and f16 converted to float32, and the dtype of the result.
struct Pair {
  Tensor input, target;
  DType dtype;
};
Pair checked_pair(const char* op, const Tensor& given_input, const Tensor& given_target) {
  const Tensor input = autocasted(op, given_input), target = autocasted(op, given_target);
  check_defined(op, "input", input, "target", target);
  check_floating(op, input);
  check_same_kind(op, {{"input", input}, {"target", target}});
  check(input.shape() == target.shape(), op, "input ", input.shape(), " and target ", target.shape(),
        " differ in shape");
  return {widened(input), widened(target), input.dtype()};
}

/// Reduces elementwise losses and converts the result to `dtype`.
Tensor reduced(const Tensor& losses, Reduction reduction, DType dtype) {
  if (reduction == Reduction::none) return losses.to(dtype);
  if (reduction == Reduction::mean) return mean(losses).to(dtype);
  const Tensor total = sum(losses);
  if (reduction == Reduction::sum || losses.dim() == 0) return total.to(dtype);
  return (total / static_cast<double>(losses.size(0))).to(dtype);
}

// ---- helpers of the classification losses

/// Returns true if the target holds probabilities instead of class indices.
bool is_soft(const Tensor& target) { return target.defined() && is_floating(target.dtype()); }

/// Checks the input and target of a classification loss. On the CPU, also checks the class indices.
void check_classes(const char* op, const Tensor& input, const Tensor& target, int64_t ignore_index) {
  check_defined(op, "input", input, "target", target);
  check_floating(op, input);
  check(input.dim() >= 2 && input.size(1) > 0, op, "input must be (N, C, ...), got ", describe(input));
  Shape expected = input.shape();
  expected.erase(1);
  if (is_soft(target)) {
    check(target.shape() == input.shape(), op, "a floating-point target must hold probabilities of shape ",
          input.shape(), "; class indices must have shape ", expected, " and dtype i64, i32 or u8; got ",
          describe(target));
    checked_pair(op, widened(input), widened(target));
    return check(ignore_index < 0, op, "ignore_index ", ignore_index,
                 " cannot be used if the target holds probabilities");
  }
  check(target.dtype() == i64 || target.dtype() == i32 || target.dtype() == u8, op,
        "target must hold class indices (i64, i32 or u8) or probabilities, got ", describe(target));
  check_same_device(op, {"input", input}, {"target", target});
  check(target.shape() == expected, op, "target must have shape ", expected, " for input ", input.shape(), ", got ",
        target.shape());
  if (target.device().is_cuda() || target.numel() == 0) return;  // reading the values would wait for the GPU
  const Tensor indices = target.to(i64), counted = where(eq(indices, ignore_index), 0, indices);
  const auto min_index = amin(counted).item<int64_t>(), max_index = amax(counted).item<int64_t>();
  check(min_index >= 0 && max_index < input.size(1), op, "target class ", min_index < 0 ? min_index : max_index,
        " is outside [0, ", input.size(1), ')');
}

void check_weight(const char* op, const Tensor& input, const Tensor& weight) {
  if (!weight.defined()) return;
  check_floating(op, weight);
  check(weight.device() == input.device() && weight.shape() == Shape{input.size(1)}, op, "weight must have shape [",
        input.size(1), "] and be on the device of the input, got ", describe(weight));
}

void check_smoothing(const char* op, double smoothing) {
  check(smoothing >= 0 && smoothing <= 1, op, "label_smoothing must lie in [0, 1], got ", smoothing);
}

/// Converts `values` (C) to the dtype of `like` (N, C, ...) and reshapes them to (1, C, 1, ...).
Tensor along_classes(const Tensor& values, const Tensor& like) {
  Shape shape = Dims::filled(like.dim(), 1);
  shape[1] = values.size(0);
  return reshape(values.to(like.dtype()), shape);
}

/// The operands of a composed loss. `counted` and `index` are undefined if the target holds probabilities.
struct Voxels {
  Tensor x;        // the input, with bf16 and f16 converted to float32; 0 for ignored voxels
  Tensor counted;  // (N, 1, ...), bool: true for voxels that are not ignored
  Tensor index;    // (N, 1, ...), i64: class indices; 0 for ignored voxels
};
Voxels voxels_of(const Tensor& input, const Tensor& target, int64_t ignore_index) {
  if (is_soft(target)) return {widened(input), {}, {}};
  const Tensor indices = unsqueeze(target.to(i64), 1), counted = ne(indices, ignore_index);
  // The alias gives the gradient the memory format of the input.
  const Tensor x = record("alias", input.detach(), {input}, [format = input.suggest_memory_format()](const Tensor& g) {
    return Tensors{g.contiguous(format)};
  });
  return {where(counted, widened(x), 0.0), counted, where(counted, indices, 0)};
}

/// Computes the sums of Kernels::class_sums with differentiable operators. The target may hold probabilities. The
/// result is (N, C, 5) if `per_sample`, otherwise (1, C, 5).
Tensor composed_sums(const char* op, const Tensor& input, const Tensor& target, const ClassSums& options,
                     bool per_sample) {
  const bool soft = is_soft(target);
  const int64_t n = input.size(0), c = input.size(1), length = input.numel() / std::max<int64_t>(n * c, 1);
  const Shape shape{n, c, length};
  const Voxels voxels =
      voxels_of(reshape(input, shape), reshape(target, soft ? shape : Shape{n, length}), options.ignore_index);
  const Tensor& x = voxels.x;
  const Tensor t = soft ? reshape(widened(target), shape) : empty_like(x);
  if (!soft)
    kernels(x.device())
        .scatter_add(op, t.view_out(), voxels.counted.to(x.dtype()).view_in(), voxels.index.view_in(), 1);
  const Tensor logs = options.softmax ? log_softmax(x, 1) : x, p = options.softmax ? exp(logs) : x;
  const auto total = [&](const Tensor& values) {
    return sum(soft ? values : where(voxels.counted, values, 0.0), per_sample ? Dims{2} : Dims{0, 2}, true).to(f64);
  };
  const auto squared = [&](const Tensor& values) { return options.squared ? values * values : values; };
  // The logs of the other classes may be -infinity, and 0 * -infinity is NaN, so where() replaces the product.
  const Tensor own_logs = soft ? t * logs : where(ne(t, 0.0), logs, 0.0);
  return cat({total(squared(p)), total(p * t), total(squared(t)), neg(total(own_logs)), neg(total(logs))}, 2);
}

/// Adds the sums over the ranks that share the volumes of `input`, if any.
Tensor sum_over_sharing_ranks(const Tensor& sums, const Tensor& input) {
  distributed::Communicator* const ranks = sharing_ranks(input.dim());
  return ranks ? sum_over_ranks(sums, *ranks) : sums;
}

/// Returns the sums of Kernels::class_sums in f64, added over the ranks that share the volumes: (N, C, 5) if
/// `per_sample`, otherwise (1, C, 5).
Tensor class_sums(const char* op, const Tensor& input, const Tensor& target, const ClassSums& options,
                  bool per_sample) {
  if (is_soft(target) || input.size(1) > kMaxClasses)
    return sum_over_sharing_ranks(composed_sums(op, input, target, options, per_sample), input);
  const int64_t n = input.size(0), c = input.size(1), length = target.numel() / std::max<int64_t>(n, 1);
  const Tensor x = reshape(input, {n, c, length}), indices = reshape(target, {n, length});
  const Tensor sums = empty({per_sample ? n : 1, c, kClassSums}, {f64, x.device()});
  kernels(x.device()).class_sums(op, sums.view_out(), x.view_in(), indices.view_in(), options);
  record(op, sums, {x}, [=, x = Saved(x), indices = Saved(indices)](const Tensor& g) {
    if (grad_enabled()) return grad({composed_sums(op, x(), indices(), options, per_sample)}, {x()}, {g}, false, true);
    const Tensor dx = empty_like(x()), gradients = g.to(widened(x().dtype())).contiguous();
    kernels(dx.device())
        .class_sums_backward(dx.view_out(), gradients.view_in(), x().view_in(), indices().view_in(), options);
    return Tensors{dx};
  });
  return sum_over_sharing_ranks(sums, input);
}

/// Multiplies sum k of class_sums by the class weights, if any, and adds the products over all classes.
Tensor weighted_sum(const Tensor& sums, int64_t k, const Tensor& weight) {
  const Tensor class_values = select(sums, 2, k);
  return sum(weight.defined() ? class_values * weight.to(f64) : class_values);
}

/// Returns the sum of the cross-entropy over all voxels, from class_sums.
Tensor cross_entropy_of(const Tensor& sums, const Tensor& weight, double smoothing) {
  const Tensor total = weighted_sum(sums, 3, weight);
  if (smoothing == 0) return total;
  return total * (1 - smoothing) + weighted_sum(sums, 4, weight) * (smoothing / static_cast<double>(sums.size(1)));
}

/// Computes cross_entropy if `logits` is true, otherwise nll_loss, from the losses of all voxels. The loss of an
/// ignored voxel is 0 for any input.
Tensor composed_cross_entropy(const char* op, const Tensor& input, const Tensor& target, const CrossEntropyOptions& o,
                              bool logits) {
  const bool soft = is_soft(target);
  const Voxels voxels = voxels_of(input, target, o.ignore_index);
  const Tensor logs = logits ? log_softmax(voxels.x, 1) : voxels.x;
  const Tensor weight = o.weight.defined() ? along_classes(o.weight, logs) : ones({}, logs.options());
  const Tensor terms = o.weight.defined() ? logs * weight : logs;
  const auto picked = [&](const Tensor& values) {
    return where(voxels.counted, gather_as(op, expand(values, logs.shape()), 1, voxels.index), 0.0);
  };
  Tensor losses = neg(soft ? sum(widened(target) * terms, {1}, true) : picked(terms));
  if (o.label_smoothing > 0) {
    const Tensor spread = sum(terms, {1}, true) * (o.label_smoothing / static_cast<double>(input.size(1)));
    losses = losses * (1 - o.label_smoothing) - (soft ? spread : where(voxels.counted, spread, 0.0));
  }
  const DType dtype = autocasted_result(input);
  if (soft || o.reduction == Reduction::none) return reduced(squeeze(losses, 1), o.reduction, dtype);
  const Tensor total = sum_over_sharing_ranks(sum(losses), input);
  if (o.reduction == Reduction::sum) return total.to(dtype);
  if (o.reduction == Reduction::batchmean) return (total / static_cast<double>(input.size(0))).to(dtype);
  return (total / sum_over_sharing_ranks(sum(picked(weight)), input)).to(dtype);
}

/// Computes cross_entropy or, without `logits`, nll_loss. The loss of an input (N, C) is composed of operators, because
/// the kernels are optimized for many voxels per sample.
Tensor entropy_loss(const char* op, const Tensor& input, const Tensor& target, const CrossEntropyOptions& o,
                    bool logits) {
  const bool composed = is_soft(target) || input.dim() == 2 || input.size(1) > kMaxClasses;
  if (composed || o.reduction == Reduction::none) return composed_cross_entropy(op, input, target, o, logits);
  const Tensor sums = class_sums(op, input, target, {o.ignore_index, logits, false}, false);
  Tensor loss = logits ? cross_entropy_of(sums, o.weight, o.label_smoothing) : neg(weighted_sum(sums, 1, o.weight));
  if (o.reduction == Reduction::mean) loss = loss / weighted_sum(sums, 2, o.weight);
  if (o.reduction == Reduction::batchmean) loss = loss / static_cast<double>(input.size(0));
  return loss.to(autocasted_result(input));
}

/// Returns the Dice loss from class_sums.
Tensor dice_of(const Tensor& sums, const DiceOptions& o) {
  const int64_t first = o.include_background ? 0 : 1;
  const Tensor counted = narrow(sums, 1, first, sums.size(1) - first);
  const Tensor p = select(counted, 2, 0), both = select(counted, 2, 1), t = select(counted, 2, 2);
  return reduced(1.0 - affine(both, 2, o.smooth_nr) / affine(p + t, 1, o.smooth_dr), o.reduction, f64);
}

void check_dice(const char* op, const Tensor& input, const DiceOptions& o) {
  check(o.include_background || input.size(1) > 1, op, "input ", input.shape(), " has no class except the background");
  check(std::isfinite(o.smooth_nr) && o.smooth_nr >= 0 && std::isfinite(o.smooth_dr) && o.smooth_dr >= 0, op,
        "smooth_nr and smooth_dr must be finite and at least 0, got ", o.smooth_nr, " and ", o.smooth_dr);
  check(!o.softmax || input.size(1) > 1, op, "softmax over the one channel of input ", input.shape(),
        " is always 1; use two channels, or sigmoid(input) and softmax = false");
}

/// Returns a view of the voxels of `target` that are nearest to the voxels of `logits`, like mode nearest_exact of
/// interpolate.
Tensor nearest(const Tensor& target, const Tensor& logits) {
  constexpr const char* kOp = "deep_supervision_loss";
  check_defined(kOp, "target", target, "logits", logits);
  check(logits.dim() > 2 && target.dim() >= logits.dim() - 1, kOp,
        "logits must be (N, C, ...) and target (N, ...), got ", describe(logits), " and ", describe(target));
  Tensor result = target;
  for (int64_t axis = 2 - logits.dim(); axis < 0; ++axis) {
    const int64_t size = target.size(axis), level_size = logits.size(axis);
    check(level_size > 0 && size % level_size == 0, kOp, "sizes of the logits ", logits.shape(),
          " must divide those of target ", target.shape());
    result = slice(result, axis, size / level_size / 2, size, size / level_size);
  }
  return result;
}

}  // namespace

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  const auto [x, y, dtype] = checked_pair("mse_loss", input, target);
  const Tensor difference = x - y;
  return reduced(difference * difference, reduction, dtype);
}

Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  const auto [x, y, dtype] = checked_pair("l1_loss", input, target);
  return reduced(abs(x - y), reduction, dtype);
}

Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, Reduction reduction, double beta) {
  const auto [x, y, dtype] = checked_pair("smooth_l1_loss", input, target);
  check(std::isfinite(beta) && beta >= 0, "smooth_l1_loss", "beta must be finite and not negative, got ", beta);
  if (beta == 0) return l1_loss(input, target, reduction);
  const Tensor difference = x - y;
  const Tensor distance = abs(difference);
  const Tensor near = lt(distance, beta);
  return reduced(where(near, difference * difference * (0.5 / beta), distance - 0.5 * beta), reduction, dtype);
}

Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target, Reduction reduction,
                                        const Tensor& pos_weight) {
  constexpr const char* kOp = "binary_cross_entropy_with_logits";
  const auto [x, y, dtype] = checked_pair(kOp, input, target);
  // -log(sigmoid(x)) = softplus(-x) and -log(1 - sigmoid(x)) = softplus(x). Neither of the two values overflows, and
  // their sum has no cancellation, because both values are positive. Above the threshold, softplus(x) equals x in
  // double precision.
  constexpr double kThreshold = 40;
  Tensor as_one = softplus(neg(x), 1, kThreshold);
  const Tensor as_zero = softplus(x, 1, kThreshold);
  if (pos_weight.defined()) {
    check_floating(kOp, pos_weight);
    check(pos_weight.device() == x.device() && broadcast_shapes(pos_weight.shape(), x.shape(), kOp) == x.shape(), kOp,
          "pos_weight must be on the device of the input and broadcast to its shape ", x.shape(), ", got ",
          describe(pos_weight));
    as_one = as_one * pos_weight.to(x.dtype());
  }
  return reduced(y * as_one + (1.0 - y) * as_zero, reduction, dtype);
}

Tensor kl_div(const Tensor& input, const Tensor& target, Reduction reduction, bool log_target) {
  const auto [x, t, dtype] = checked_pair("kl_div", input, target);
  if (log_target) return reduced(exp(t) * (t - x), reduction, dtype);
  return reduced(t * (log(where(eq(t, 0), 1.0, t)) - x), reduction, dtype);
}

// ---- classification losses

Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  constexpr const char* kOp = "cross_entropy";
  check_smoothing(kOp, options.label_smoothing);
  check_classes(kOp, input, target, options.ignore_index);
  check_weight(kOp, input, options.weight);
  return entropy_loss(kOp, input, target, options, true);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, Reduction reduction) {
  return cross_entropy(input, target, CrossEntropyOptions{.reduction = reduction});
}

Tensor nll_loss(const Tensor& input, const Tensor& target, const NLLLossOptions& options) {
  constexpr const char* kOp = "nll_loss";
  check(!is_soft(target), kOp, "target must hold class indices, got ", describe(target));
  check_classes(kOp, input, target, options.ignore_index);
  check_weight(kOp, input, options.weight);
  return entropy_loss(kOp, input, target, {options.weight, options.ignore_index, 0, options.reduction}, false);
}

Tensor dice_loss(const Tensor& input, const Tensor& target, const DiceOptions& options) {
  constexpr const char* kOp = "dice_loss";
  check_classes(kOp, input, target, options.ignore_index);
  check_dice(kOp, input, options);
  const ClassSums sums{options.ignore_index, options.softmax, options.squared_pred};
  return dice_of(class_sums(kOp, input, target, sums, !options.batch), options).to(autocasted_result(input));
}

Tensor dice_ce_loss(const Tensor& input, const Tensor& target, const DiceCEOptions& options) {
  constexpr const char* kOp = "dice_ce_loss";
  const DiceOptions& dice = options.dice;
  check_smoothing(kOp, options.label_smoothing);
  check_classes(kOp, input, target, dice.ignore_index);
  check_weight(kOp, input, options.weight);
  check_dice(kOp, input, dice);
  check_finite(kOp, "lambda_dice", options.lambda_dice);
  check_finite(kOp, "lambda_ce", options.lambda_ce);
  check(dice.softmax, kOp, "requires logits: dice.softmax must be true");
  check(dice.reduction == Reduction::mean || dice.reduction == Reduction::sum, kOp, "reduction must be mean or sum");
  const Tensor sums = class_sums(kOp, input, target, {dice.ignore_index, true, dice.squared_pred}, !dice.batch);
  const Tensor overlap = dice_of(sums, dice);
  Tensor entropy = cross_entropy_of(sums, options.weight, options.label_smoothing);
  if (dice.reduction == Reduction::mean) {
    const auto* const ranks = sharing_ranks(input.dim());
    const double voxels = static_cast<double>(input.numel() / input.size(1)) * (ranks ? ranks->size() : 1);
    if (is_soft(target)) {
      entropy = entropy / std::max(voxels, 1.0);
    } else {
      // If every voxel is ignored, the sum of the weights is 0. Dividing by infinity makes the mean and its gradient 0.
      const Tensor weights = weighted_sum(sums, 2, options.weight);
      entropy = entropy / where(eq(weights, 0), std::numeric_limits<double>::infinity(), weights);
    }
  }
  return (overlap * options.lambda_dice + entropy * options.lambda_ce).to(autocasted_result(input));
}

Tensor deep_supervision_loss(const Tensors& levels, const Tensor& target, const DiceCEOptions& options) {
  check(!levels.empty(), "deep_supervision_loss", "there are no logits");
  const size_t count = std::max<size_t>(levels.size() - 1, 1);  // levels with a weight other than 0
  if (count < levels.size()) {
    const Tensor& last = levels.back();
    check_classes("deep_supervision_loss", last, nearest(target, last), options.dice.ignore_index);
  }
  double weight = 1 / (2 - std::ldexp(2, -static_cast<int>(count)));
  Tensor total;
  for (size_t i = 0; i < count; ++i, weight /= 2) {
    const Tensor loss = dice_ce_loss(levels[i], nearest(target, levels[i]), options) * weight;
    total = i == 0 ? loss : total + loss;
  }
  return total;
}

}  // namespace voxgrad
