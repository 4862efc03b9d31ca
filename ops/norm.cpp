// Normalisation: one kernel over the groups of (N, C, L) serves groups, instances, layers and batches.
//
// The gradient is a fused kernel too. Where it will itself be differentiated it is composed of operators
// instead, from the same formula.
#include "ops/norm.h"

#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/kernels.h"
#include "ops/rectified.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/volume.h"

namespace voxgrad {
namespace {

/// Which gradients are wanted, and the dtypes of the parameters'.
struct Wanted {
  bool x;
  std::optional<DType> weight, bias, relu_bias;
};
std::optional<DType> wanted_dtype(const Tensor& t) { return wants_grad(t) ? std::optional(t.dtype()) : std::nullopt; }

/// The dtype of statistics, and what the parameters of halves may have.
DType wide(DType dtype) { return dtype == f64 ? f64 : f32; }

/// With n = (x - mean) * rstd: dbias = sum dy, dweight = sum dy * n, and with h = dy * weight,
/// dx = rstd * (h - mean(h) - n * mean(h * n)) over each group. `groups`: the shape of the statistics.
Tensors composed_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight, const Shape& groups, double eps,
                           Wanted wanted) {
  const int64_t n = x.size(0), c = x.size(1);
  const DType dtype = wide(x.dtype());
  const Shape rows{n, c, x.numel() / (n * c)}, in_groups{n, groups[1], x.numel() / (n * groups[1])};
  const Dims axes = groups[0] == n ? Dims{2} : Dims{0, 2};
  const Tensor values = reshape(x.to(dtype), in_groups);
  const Tensor centred = values - mean(values, axes, true);
  const Tensor rstd = rsqrt(mean(centred * centred, axes, true) + eps);
  const Tensor normal = centred * rstd;
  const Tensor dy = reshape(grad.to(dtype), rows);

  Tensors grads(3);
  if (wanted.x) {
    const Tensor h = reshape(weight.defined() ? dy * reshape(weight.to(dtype), {c, 1}) : dy, in_groups);
    const Tensor dx = rstd * (h - mean(h, axes, true) - normal * mean(h * normal, axes, true));
    grads[0] = reshape(dx, x.shape()).to(x.dtype());
  }
  if (wanted.weight) grads[1] = sum(dy * reshape(normal, rows), {0, 2}).to(*wanted.weight);
  if (wanted.bias) grads[2] = sum(dy, {0, 2}).to(*wanted.bias);
  return grads;
}

/// The same through the ReLU that made x, from z and relu_bias.
Tensors composed_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight, const Shape& groups, double eps,
                           Wanted wanted, const Tensor& relu_bias) {
  const Tensor y = record_relu(x, relu_bias);
  Tensors grads = composed_gradients(grad, y, weight, groups, eps, wanted);
  const Tensors through = relu_gradients(grads[0], y, wanted.relu_bias.has_value());
  grads[0] = through[0];
  grads.push_back(through[1]);
  return grads;
}

Tensors fused_gradients(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                        const Tensor& weight, Wanted wanted, bool relu) {
  const Tensor dy = grad.contiguous(x.suggest_memory_format());
  const Tensor dx = empty_like(x);
  Tensors grads{wanted.x ? dx : Tensor(), Tensor(), Tensor(), Tensor()};
  std::optional<View> dweight, dbias, drelu_bias;
  const auto allocate = [&](Tensor& into, std::optional<View>& view, std::optional<DType> dtype) {
    if (!dtype) return;
    into = empty({x.size(1)}, {*dtype, x.device()});
    view = into.view_out();
  };
  allocate(grads[1], dweight, wanted.weight);
  allocate(grads[2], dbias, wanted.bias);
  allocate(grads[3], drelu_bias, wanted.relu_bias);
  const auto gamma = optional_view(weight);
  kernels(x.device())
      .group_norm_backward(as_rows(x, dx.view_out()), pointer(dweight), pointer(dbias), as_rows(x, dy.view_in()),
                           as_rows(x, x.view_in()), mean.view_in(), rstd.view_in(), pointer(gamma),
                           {relu, pointer(drelu_bias)});
  if (!relu) grads.pop_back();
  return grads;
}

void check_affine(const char* op, const char* what, const Tensor& t, const Shape& shape) {
  check(!t.defined() || t.shape() == shape, op, what, " must have shape ", shape, ", got ", describe(t));
}

void check_eps(const char* op, double eps) {
  check(std::isfinite(eps) && eps >= 0, op, "eps must be finite and not negative, got ", eps);
}

struct Normalised {
  Tensor y, mean, rstd;
};

/// `groups`: the shape of the statistics, (N, groups), or (1, C): over the samples too.
/// `before`: what was added before the ReLU if `input` is rectified (ops/rectified.h); may be undefined.
Normalised normalise(const char* op, const Tensor& input, const Shape& groups, const Tensor& weight, const Tensor& bias,
                     double eps, const std::optional<Tensor>& before = {}) {
  const Tensor x = is_dense_volume(input) ? input : input.contiguous();
  const Tensor y = empty_like(x);
  const Tensor mean = empty(groups, {wide(x.dtype()), x.device()}), rstd = empty_like(mean);
  const auto gamma = optional_view(weight), beta = optional_view(bias);
  kernels(x.device())
      .group_norm(as_rows(x, y.view_out()), mean.view_out(), rstd.view_out(), as_rows(x, x.view_in()), pointer(gamma),
                  pointer(beta), eps);
  const bool relu = before.has_value();
  const auto drelu_bias = relu ? wanted_dtype(*before) : std::nullopt;
  const Wanted wanted{x.requires_grad() || drelu_bias, wanted_dtype(weight), wanted_dtype(bias), drelu_bias};
  Tensors inputs{x, weight, bias};
  if (relu) inputs.push_back(*before);
  record(op, y, inputs,
         [=, x = Saved(x), mean = Saved(mean), rstd = Saved(rstd), weight = Saved(weight),
          before = relu ? Saved(*before) : Saved()](const Tensor& grad) {
           // Nothing to normalise, and no means of it: the kernel knows what empty sums are.
           if (!grad_enabled() || x().numel() == 0)
             return fused_gradients(grad, x(), mean(), rstd(), weight(), wanted, relu);
           return relu ? composed_gradients(grad, x(), weight(), groups, eps, wanted, before())
                       : composed_gradients(grad, x(), weight(), groups, eps, wanted);
         });
  return {y, mean, rstd};
}

/// Normalisation with a mean and rstd (1, C) that are given, and differentiable in the other three.
Tensor normalise_with(const Tensor& mean, const Tensor& rstd, const Tensor& input, const Tensor& weight,
                      const Tensor& bias) {
  const Tensor x = is_dense_volume(input) ? input : input.contiguous();
  const Tensor y = empty_like(x);
  const auto gamma = optional_view(weight), beta = optional_view(bias);
  kernels(x.device())
      .normalize(as_rows(x, y.view_out()), as_rows(x, x.view_in()), mean.view_in(), rstd.view_in(), pointer(gamma),
                 pointer(beta));
  const Wanted wanted{x.requires_grad(), wanted_dtype(weight), wanted_dtype(bias), {}};
  return record("batch_norm", y, {x, weight, bias},
                [=, x = Saved(x), mean = Saved(mean), rstd = Saved(rstd), weight = Saved(weight)](const Tensor& grad) {
                  const DType dtype = wide(x().dtype());
                  Dims axes{0};
                  for (int64_t i = 2; i < x().dim(); ++i) axes.push_back(i);
                  Tensors grads(3);
                  if (wanted.x) grads[0] = normalise_with(zeros_like(mean()), rstd(), grad, weight(), {});
                  if (wanted.weight) {
                    const Tensor normal = normalise_with(mean(), rstd(), x().to(dtype), {}, {});
                    grads[1] = sum(grad.to(dtype) * normal, axes).to(*wanted.weight);
                  }
                  if (wanted.bias) grads[2] = sum(grad.to(dtype), axes).to(*wanted.bias);
                  return grads;
                });
}

void check_input(const char* op, const Tensor& x, int64_t least_rank, const char* form) {
  check_defined(op, "input", x);
  check_floating(op, x);
  check(x.dim() >= least_rank, op, "input must be ", form, ", got ", describe(x));
}

void check_parameters(const char* op, const Tensor& x, std::initializer_list<Operand> parameters, const Shape& shape) {
  for (const Operand& parameter : parameters) {
    const Tensor& t = parameter.tensor;
    check_affine(op, parameter.name, t, shape);
    if (t.defined() && t.device() == x.device() && t.dtype() == wide(x.dtype())) continue;
    check_same_kind(op, {{"input", x}, parameter});
  }
}

}  // namespace

namespace {

void check_group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight, const Tensor& bias, double eps) {
  check_input("group_norm", x, 2, "(N, C, spatial...)");
  check_eps("group_norm", eps);
  check(num_groups > 0, "group_norm", "num_groups must be positive, got ", num_groups);
  check(x.size(1) > 0 && x.size(1) % num_groups == 0, "group_norm", "num_groups ", num_groups, " does not divide the ",
        x.size(1), " channels of input ", x.shape());
  check_parameters("group_norm", x, {{"weight", weight}, {"bias", bias}}, {x.size(1)});
  check(x.numel() != num_groups, "group_norm", "expected more than 1 value per channel, got input ", x.shape(), " in ",
        num_groups, " groups");
}

}  // namespace

Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight, const Tensor& bias, double eps) {
  check_group_norm(x, num_groups, weight, bias, eps);
  return normalise("group_norm", x, {x.size(0), num_groups}, weight, bias, eps).y;
}

Tensor record_relu_group_norm(const Tensor& rectified, const Tensor& relu_bias, int64_t num_groups,
                              const Tensor& weight, const Tensor& bias, double eps) {
  check_group_norm(rectified, num_groups, weight, bias, eps);
  return normalise("relu_group_norm", rectified, {rectified.size(0), num_groups}, weight, bias, eps, relu_bias).y;
}

Tensor instance_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check_input("instance_norm", x, 3, "(N, C, spatial...)");
  check_eps("instance_norm", eps);
  check_parameters("instance_norm", x, {{"weight", weight}, {"bias", bias}}, {x.size(1)});
  int64_t voxels = 1;
  for (int64_t i = 2; i < x.dim(); ++i) voxels *= x.size(i);
  check(voxels != 1, "instance_norm", "expected more than 1 value per channel, got input ", x.shape());
  return normalise("instance_norm", x, {x.size(0), x.size(1)}, weight, bias, eps).y;
}

namespace {

/// Moves what is kept between batches, if there is such, towards the value of this one.
void track(const Tensor& running, const Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(reshape(value, running.shape()).to(running.dtype()), momentum);
}

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps) {
  constexpr const char* kOp = "batch_norm";
  check_input(kOp, x, 2, "(N, C, spatial...)");
  check_eps(kOp, eps);
  check_finite(kOp, "momentum", momentum);
  const int64_t channels = x.size(1);
  check_parameters(kOp, x,
                   {{"weight", weight}, {"bias", bias}, {"running_mean", running_mean}, {"running_var", running_var}},
                   {channels});
  const bool tracks = running_mean.defined() && running_var.defined();
  check(training || tracks, kOp, "needs running_mean and running_var where it is not training");
  check(!training || x.numel() == 0 || x.numel() != channels, kOp,
        "expected more than 1 value per channel in training, got input ", x.shape());
  if (x.dim() == 2) {  // one sample with channels innermost, whose positions share the work
    const Tensor rows = unsqueeze(transpose(x, 0, 1), 0);
    const Tensor y = batch_norm(rows, running_mean, running_var, weight, bias, training, momentum, eps);
    return transpose(squeeze(y, 0), 0, 1);
  }
  if (!training) {
    const auto row = [&](const Tensor& t) { return reshape(t.detach().to(wide(x.dtype())), {1, channels}); };
    const Tensor mean = row(running_mean), rstd = rsqrt(row(running_var) + eps);
    return normalise_with(mean, rstd, x, weight, bias);
  }
  const Normalised result = normalise(kOp, x, {1, channels}, weight, bias, eps);
  if (x.numel() == 0) return result.y;
  NoGradGuard no_grad;
  track(running_mean, result.mean, momentum);
  const double count = static_cast<double>(x.numel() / channels), unbiased = count / (count - 1);
  const Tensor deviation = reciprocal(result.rstd);
  track(running_var, clamp(affine(deviation * deviation, unbiased, -eps * unbiased), 0, INFINITY), momentum);
  return result.y;
}

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  check_input("layer_norm", x, 1, "(..., normalized_shape)");
  check_eps("layer_norm", eps);
  const int64_t lead = x.dim() - normalized_shape.size();
  bool fits = !normalized_shape.empty() && lead >= 0;
  for (int64_t i = 0; fits && i < normalized_shape.size(); ++i) fits = x.size(lead + i) == normalized_shape[i];
  check(fits, "layer_norm", "normalized_shape ", normalized_shape, " does not match the last axes of input ",
        x.shape());
  check_parameters("layer_norm", x, {{"weight", weight}, {"bias", bias}}, normalized_shape);

  int64_t rows = 1;
  for (int64_t i = 0; i < lead; ++i) rows *= x.size(i);
  const Tensor flat = reshape(x, {rows, 1, numel(normalized_shape)});
  const Tensor y = reshape(normalise("layer_norm", flat, {rows, 1}, {}, {}, eps).y, x.shape());
  const Tensor scaled = weight.defined() ? y * weight.to(y.dtype()) : y;
  return bias.defined() ? scaled + bias.to(y.dtype()) : scaled;
}

}  // namespace voxgrad
