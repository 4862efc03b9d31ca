// Normalization. One kernel normalizes groups of a tensor (N, C, L), and thus computes group, instance, layer and batch
// norm. Another kernel computes the gradients. With create_graph, the gradients are computed by differentiating a
// normalization that is composed of other operators.
#include "ops/norm.h"

#include <algorithm>
#include <utility>

#include "ops/detail/unrecorded.h"

namespace voxgrad {

Tensor record_added(const Tensor& x, const Tensor& added) {
  if (!needs_gradient(added)) return x;
  return record("add_bias", x.detach(), {x, added},
                [axes = all_but_channels(x), dtype = added.dtype()](const Tensor& g) -> Tensors {
                  return {g, sum(g, axes).to(dtype)};
                });
}

Tensors recorded_gradients(const std::function<Tensor(const Tensors&)>& function, const Tensors& inputs,
                           const Tensor& grad_output) {
  // Differentiate with respect to new tensors. Otherwise, two inputs that are the same tensor would both get the sum of
  // their gradients, an input would also get the gradients of inputs that depend on it, and hooks would be called
  // twice.
  Tensors own, active, grads(inputs.size());
  for (const Tensor& input : inputs) {
    own.push_back(!needs_gradient(input) ? input : record("identity", input.detach(), {input}, [](const Tensor& g) {
      return Tensors{g};
    }));
    if (needs_gradient(input)) active.push_back(own.back());
  }
  const Tensors found = grad({function(own)}, active, {grad_output}, false, true, true);
  for (size_t i = 0, k = 0; i < inputs.size(); ++i)
    if (needs_gradient(inputs[i])) grads[i] = found[k++];
  return grads;
}

namespace {

/// Non-tensor arguments for the gradient of a normalization.
struct GradientRequest {
  Shape groups;  // shape of the statistics: (N, groups), or (1, C)
  double eps;
  NormActivations activations;
  bool x;                                      // whether to compute the gradient of x
  std::optional<DType> weight, bias, added;    // dtypes of the gradients to compute
  distributed::Communicator* ranks = nullptr;  // the ranks whose elements contribute to a group, or null
};
std::optional<DType> gradient_dtype(const Tensor& t) {
  return needs_gradient(t) ? std::optional(t.dtype()) : std::nullopt;
}

/// Computes the gradients by differentiating the normalization composed of operators.
Tensors composed_gradients(const Tensor& grad, const Tensor& saved, const Tensor& weight, const Tensor& bias,
                           const Tensor& added, const GradientRequest& r) {
  const int64_t n = saved.size(0), c = saved.size(1);
  const DType dtype = widened(saved.dtype());
  const Dims axes = r.groups[0] == n ? Dims{2} : Dims{0, 2};
  const auto per_channel = [&](const Tensor& t) { return reshape(t.to(dtype), {c, 1}); };
  const auto composed = [&](const Tensors& inputs) {
    const Tensor x = activation(r.activations.before, record_added(inputs[0], inputs[3]).to(dtype));
    const Tensor values = reshape(x, {n, r.groups[1], saved.numel() / (n * r.groups[1])});
    const Tensor centered = values - mean(values, axes, true);
    const Tensor normal = centered * rsqrt(mean(centered * centered, axes, true) + r.eps);
    Tensor u = reshape(normal, {n, c, saved.numel() / (n * c)});
    if (weight.defined()) u = u * per_channel(inputs[1]);
    if (bias.defined()) u = u + per_channel(inputs[2]);
    return reshape(activation(r.activations.after, u), saved.shape()).to(saved.dtype());
  };
  return recorded_gradients(composed, {saved, weight, bias, added}, grad);
}

/// Two values per group, gathered from all ranks, and the number of elements of a group on each rank, in f64.
struct OfRanks {
  Tensor values;  // (ranks, n, groups, 2)
  Tensor counts;  // (ranks): number of elements of a group
  Tensor shares;  // (ranks, 1, 1): counts divided by their sum
};

/// Gathers `values` (n, groups, 2) from all ranks. `elements` is the number of elements of the input on this rank,
/// which may differ between ranks.
OfRanks gather(distributed::Communicator& ranks, const Tensor& values, int64_t elements) {
  const double count = static_cast<double>(elements * 2) / static_cast<double>(std::max<int64_t>(values.numel(), 1));
  const Tensor all = ranks.all_gather(cat({flatten(values), full({1}, count, values.options())}, 0));
  const Tensor counts = select(all, 1, values.numel());
  Shape shape = values.shape();
  shape.insert(0, all.size(0));
  return {reshape(narrow(all, 1, 0, values.numel()), shape), counts,
          reshape(counts / clamp_min(sum(counts), 1), {-1, 1, 1})};
}

/// Replaces the statistics of this rank, (mean, rstd = 1 / sqrt(variance + eps)), with those of all ranks. The joint
/// variance + eps is the weighted mean of rstd^-2 + (mean - joint mean)^2 over the ranks. Returns the number of
/// elements of a group on each rank.
Tensor join_statistics(distributed::Communicator& ranks, const Tensor& statistics, int64_t elements) {
  const NoGradGuard no_grad;
  const auto [values, counts, shares] = gather(ranks, statistics, elements);
  const Tensor means = select(values, 3, 0), rstds = select(values, 3, 1), mean = sum(shares * means, 0);
  const Tensor distance = means - mean, square = reciprocal(rstds * rstds) + distance * distance;
  const Tensor variance = sum(where(gt(shares, 0), shares * square, 0.0), 0);
  statistics.copy_(stack({mean, rsqrt(variance)}, 2));
  return counts;
}

/// Replaces the means over the elements of this rank with the means over the elements of all ranks.
void join_means(distributed::Communicator& ranks, const Tensor& means, int64_t elements) {
  const NoGradGuard no_grad;
  const OfRanks all = gather(ranks, means, elements);
  means.copy_(sum(all.values * unsqueeze(all.shares, 3), 0));
}

/// Computes the gradients of x, weight, bias and the added bias with one kernel.
Tensors fused_gradients(const Tensor& grad, const Tensor& x, const Tensor& statistics, const Tensor& weight,
                        const Tensor& bias, const GradientRequest& r) {
  const Tensor dy = grad.contiguous(x.suggest_memory_format());
  const Tensor dx = empty_like(x);
  const auto allocated = [&](std::optional<DType> dtype) {
    return dtype ? empty({x.size(1)}, {*dtype, x.device()}) : Tensor();
  };
  // The kernel writes the gradient of the added bias in f32 or f64. The gradient is converted below, because under
  // autocast the dtype of the bias may differ from the dtype of x.
  const Tensor sums = allocated(r.added ? std::optional(widened(x.dtype())) : std::nullopt);
  Tensors grads{r.x ? dx : Tensor(), allocated(r.weight), allocated(r.bias), sums};
  const Tensor means = empty_like(statistics);
  const JoinRanks join = [&] { join_means(*r.ranks, means, x.numel()); };
  kernels(x.device())
      .group_norm_backward({as_rows(x, dx.view_out()), OptionalView(grads[1], true), OptionalView(grads[2], true),
                            OptionalView(sums, true)},
                           means.view_out(), as_rows(x, dy.view_in()), as_rows(x, x.view_in()), statistics.view_in(),
                           OptionalView(weight), OptionalView(bias), r.activations, r.ranks ? &join : nullptr);
  if (r.added) grads[3] = sums.to(*r.added);
  return grads;
}

struct NormResult {
  Tensor y;
  Tensor statistics;  // (groups..., 2), f64: mean and rstd
  Tensor counts;      // (ranks), f64: number of elements of a group on each rank; undefined without ranks
};

/// Normalizes with the statistics of the input, and records the operation. `groups` is the shape of the statistics:
/// (N, groups), or (1, C) for statistics over the batch. `added`: see ops/detail/unrecorded.h. `ranks`: the ranks
/// whose elements contribute to a group, or null. The ranks may have different numbers of elements.
NormResult normalize_groups(const char* op, const Tensor& input, const Shape& groups, const Tensor& weight,
                            const Tensor& bias, double eps, const NormActivations& activations = {},
                            const Tensor& added = {}, distributed::Communicator* ranks = nullptr,
                            bool overwrite = false, const Tensor& residual = {}) {
  const Tensor x = is_dense_volume(input) ? input : input.contiguous(input.suggest_memory_format());
  const Tensor to_add = residual.defined() ? residual.detach().contiguous(x.suggest_memory_format()) : Tensor();
  // Only the CPU kernel can overwrite x: it reads each element before it writes the element of the same index. With
  // gradients enabled, keep x for the backward pass.
  const Tensor y = overwrite && x.device().is_cpu() && !grad_enabled() ? x : empty_like(x);
  const Tensor statistics = empty({groups[0], groups[1], 2}, {f64, x.device()});
  Tensor counts;
  const JoinRanks join = [&] { counts = join_statistics(*ranks, statistics, x.numel()); };
  const View rows_to_add = to_add.defined() ? as_rows(x, to_add.view_in()) : View();
  kernels(x.device())
      .group_norm(as_rows(x, y.view_out()), statistics.view_out(), as_rows(x, x.view_in()), OptionalView(weight),
                  OptionalView(bias), to_add.defined() ? &rows_to_add : nullptr, eps, activations,
                  ranks ? &join : nullptr);
  GradientRequest r{
      groups, eps, activations, x.requires_grad(), gradient_dtype(weight), gradient_dtype(bias), gradient_dtype(added),
      ranks};
  const bool with_residual = residual.defined();
  const ActivationArguments after = with_residual ? std::exchange(r.activations.after, {}) : ActivationArguments();
  const Saved result = after.kind == ActivationKind::none ? Saved() : Saved(y.detach());
  record(op, y, {x, weight, bias, added, residual},
         [op, r, with_residual, after, result, x = Saved(x), statistics = Saved(statistics), weight = Saved(weight),
          bias = Saved(bias), added = Saved(added)](const Tensor& grad) {
           if (r.ranks) autograd::once_differentiable(op);
           // With a residual, compute the gradient of the sum first. The activation preserves the sign of the sum.
           const Tensor g = result().defined() ? activation_gradient(after, grad, result()) : grad;
           Tensors grads(4);
           // Use the kernel for empty tensors: it defines their sums as 0, whereas a mean would be NaN.
           if (r.x || r.weight || r.bias || r.added)
             grads = !grad_enabled() || x().numel() == 0 ? fused_gradients(g, x(), statistics(), weight(), bias(), r)
                                                         : composed_gradients(g, x(), weight(), bias(), added(), r);
           grads.push_back(with_residual ? g : Tensor());
           return grads;
         });
  return {y, statistics, counts};
}

/// Normalizes with the given mean and rstd (1, C), which are constants. The result is differentiable with respect to
/// the input, weight and bias.
Tensor normalize_with(const Tensor& mean, const Tensor& rstd, const Tensor& input, const Tensor& weight,
                      const Tensor& bias) {
  const Tensor x = is_dense_volume(input) ? input : input.contiguous(input.suggest_memory_format());
  const Tensor y = empty_like(x), statistics = empty({1, x.size(1), 2}, {f64, x.device()});
  statistics.copy_(stack({mean, rstd}, 2));
  kernels(x.device())
      .normalize(as_rows(x, y.view_out()), as_rows(x, x.view_in()), statistics.view_in(), OptionalView(weight),
                 OptionalView(bias));
  const GradientRequest r{{}, 0, {}, x.requires_grad(), gradient_dtype(weight), gradient_dtype(bias), {}};
  return record("batch_norm", y, {x, weight, bias},
                [=, x = Saved(x), mean = Saved(mean), rstd = Saved(rstd), weight = Saved(weight)](const Tensor& grad) {
                  const DType dtype = widened(x().dtype());
                  const Dims axes = all_but_channels(x());
                  Tensors grads(3);
                  if (r.x) grads[0] = normalize_with(zeros_like(mean()), rstd(), grad, weight(), {});
                  if (r.weight) {
                    const Tensor normal = normalize_with(mean(), rstd(), x().to(dtype), {}, {});
                    grads[1] = sum(grad.to(dtype) * normal, axes).to(*r.weight);
                  }
                  if (r.bias) grads[2] = sum(grad.to(dtype), axes).to(*r.bias);
                  return grads;
                });
}

void check_input(const char* op, const Tensor& x, int64_t min_rank, const char* form) {
  check_floating(op, x);
  check(x.dim() >= min_rank, op, "input must be ", form, ", got ", describe(x));
}

void check_parameters(const char* op, const Tensor& x, std::initializer_list<Operand> parameters, const Shape& shape) {
  for (const Operand& parameter : parameters) {
    const Tensor& t = parameter.tensor;
    check(!t.defined() || t.shape() == shape, op, parameter.name, " must have shape ", shape, ", got ", describe(t));
    if (t.defined() && t.device() == x.device() && t.dtype() == widened(x.dtype())) continue;
    check_same_kind(op, {{"input", x}, parameter});
  }
}

/// Checks the arguments of a group, instance or batch norm. Returns the shape of its statistics.
Shape checked_statistics(const char* op, const Tensor& x, const NormArguments& norm) {
  const bool by_group = norm.kind == NormKind::group, batch = norm.kind == NormKind::batch;
  const bool instance = norm.kind == NormKind::instance;
  check_input(op, x, instance ? 3 : 2, "(N, C, spatial...)");
  check_eps(op, norm.eps);
  check(norm.momentum >= 0 && norm.momentum <= 1, op, "momentum must lie in [0, 1], got ", norm.momentum);
  const int64_t channels = x.size(1), groups = by_group ? norm.num_groups : channels;
  check(!by_group || groups > 0, op, "num_groups must be positive, got ", groups);
  check(!by_group || (channels > 0 && channels % groups == 0), op, "num_groups ", groups,
        " does not divide the channel count ", channels, " of input ", x.shape());
  check_parameters(op, x,
                   {{"weight", norm.weight},
                    {"bias", norm.bias},
                    {"running_mean", norm.running_mean},
                    {"running_var", norm.running_var}},
                   {channels});
  check(norm.training || (norm.running_mean.defined() && norm.running_var.defined()), op,
        "running_mean and running_var are required if training is false");
  const int64_t parts = norm.ranks ? norm.ranks->size() : 1;
  const bool single = instance ? voxel_count(op, x) * parts == 1 : x.numel() > 0 && x.numel() * parts == groups;
  check(!norm.training || !single, op, "expected more than 1 value per channel", batch ? " in training" : "",
        ", got input ", x.shape(), by_group ? concat(" in ", groups, " groups") : "");
  return {batch ? 1 : x.size(0), groups};
}

/// Updates the running statistics of a batch norm, if defined, with those of this batch.
void track(const Tensor& x, const NormResult& result, const NormArguments& norm) {
  if ((x.numel() == 0 && !norm.ranks) || x.size(1) == 0 || autograd::recomputing()) return;
  NoGradGuard no_grad;
  for (const Tensor& running : {norm.running_mean, norm.running_var})
    if (running.defined()) check_in_place("batch_norm", running);
  kernels(x.device())
      .track_statistics(OptionalView(norm.running_mean, true), OptionalView(norm.running_var, true),
                        result.statistics.view_in(), norm.eps, static_cast<double>(x.numel() / x.size(1)),
                        OptionalView(result.counts), norm.momentum);
}

/// Returns whether normalize_groups() can add the residual. The backward pass computes the gradient of the activation
/// from the activation's result, so that the activation must preserve signs.
bool adds_residual(const Tensor& x, const NormArguments& norm, const NormActivations& activations,
                   const Tensor& residual) {
  const ActivationArguments& after = activations.after;
  const bool keeps_sign = after.kind == ActivationKind::none || after.kind == ActivationKind::relu ||
                          (after.kind == ActivationKind::leaky_relu && after.negative_slope > 0);
  return keeps_sign && x.dim() > 2 && (norm.kind != NormKind::batch || norm.training) &&
         residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.device() == x.device();
}

/// Checks the arguments of a norm over the last axes. Returns the number of axes before the normalized axes.
int64_t check_last_axes(const char* op, const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                        const Tensor& bias, double eps) {
  check_input(op, x, 1, "(..., normalized_shape)");
  check_eps(op, eps);
  const int64_t lead = x.dim() - normalized_shape.size();
  bool fits = !normalized_shape.empty() && lead >= 0;
  for (int64_t i = 0; fits && i < normalized_shape.size(); ++i) fits = x.size(lead + i) == normalized_shape[i];
  check(fits, op, "normalized_shape ", normalized_shape, " does not match the last axes of input ", x.shape());
  check_parameters(op, x, {{"weight", weight}, {"bias", bias}}, normalized_shape);
  return lead;
}

/// Returns the distance from 1 to the next larger number of the dtype.
double machine_epsilon(DType dtype) {
  return dtype == f64 ? 0x1p-52 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 0x1p-23;
}

}  // namespace

Tensor normalize_with_activations(const Tensor& x, const NormArguments& given, const NormActivations& activations,
                                  const Tensor& added, bool overwrite, const Tensor& residual) {
  if (residual.defined() && !adds_residual(x, given, activations, residual)) {
    const Tensor y = normalize_with_activations(x, given, {activations.before, {}}, added, overwrite);
    return activation(activations.after, y + residual);
  }
  NormArguments norm = given;
  if (norm.ranks && norm.ranks->size() == 1) norm.ranks = nullptr;
  if (!norm.ranks && x.defined()) norm.ranks = sharing_ranks(x.dim());
  constexpr const char* kNames[] = {"", "group_norm", "instance_norm", "batch_norm"};  // in the order of NormKind
  const char* const name = kNames[static_cast<size_t>(norm.kind)];
  const Shape groups = checked_statistics(name, x, norm);
  // Treat (N, C) as one channels-last sample with N positions, so that the kernel can split the positions among
  // threads.
  if (norm.kind == NormKind::batch && x.dim() == 2) {
    const Tensor rows = unsqueeze(transpose(x, 0, 1), 0);
    return transpose(squeeze(normalize_with_activations(rows, norm, activations, added), 0), 0, 1);
  }
  if (norm.kind == NormKind::batch && !norm.training) {
    const auto row = [&](const Tensor& t) { return reshape(t.detach().to(widened(x.dtype())), groups); };
    const Tensor mean = row(norm.running_mean), rstd = rsqrt(row(norm.running_var) + norm.eps);
    const Tensor v = activation(activations.before, record_added(x, added));
    return activation(activations.after, normalize_with(mean, rstd, v, norm.weight, norm.bias));
  }
  const char* const op = activations.any() ? "norm_activation" : name;
  const NormResult result = normalize_groups(op, x, groups, norm.weight, norm.bias, norm.eps, activations, added,
                                             norm.ranks, overwrite, residual);
  if (norm.kind == NormKind::batch) track(x, result, norm);
  return result.y;
}

Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize_with_activations(
      x, {.kind = NormKind::group, .weight = weight, .bias = bias, .eps = eps, .num_groups = num_groups}, {});
}
Tensor instance_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize_with_activations(x, {.kind = NormKind::instance, .weight = weight, .bias = bias, .eps = eps}, {});
}
Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps) {
  return normalize_with_activations(x,
                                    {.kind = NormKind::batch,
                                     .weight = weight,
                                     .bias = bias,
                                     .eps = eps,
                                     .running_mean = running_mean,
                                     .running_var = running_var,
                                     .training = training,
                                     .momentum = momentum},
                                    {});
}

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  const int64_t lead = check_last_axes("layer_norm", x, normalized_shape, weight, bias, eps);
  const int64_t rows = numel(Shape(std::span(x.shape().data(), static_cast<size_t>(lead))), "layer_norm");
  const Tensor flat = reshape(x, {rows, 1, numel(normalized_shape)});
  const Tensor y = reshape(normalize_groups("layer_norm", flat, {rows, 1}, {}, {}, eps).y, x.shape());
  const Tensor scaled = weight.defined() ? y * weight.to(y.dtype()) : y;
  return bias.defined() ? scaled + bias.to(y.dtype()) : scaled;
}

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, std::optional<double> eps) {
  const int64_t lead = check_last_axes("rms_norm", x, normalized_shape, weight, {}, eps.value_or(0));
  Dims axes;
  for (int64_t i = lead; i < x.dim(); ++i) axes.push_back(i);
  const Tensor wide = widened(x);
  const Tensor y = wide * rsqrt(mean(wide * wide, axes, true) + eps.value_or(machine_epsilon(x.dtype())));
  return (weight.defined() ? y * weight.to(y.dtype()) : y).to(x.dtype());
}

}  // namespace voxgrad
