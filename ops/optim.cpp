#include "ops/optim.h"

#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/halves.h"
#include "ops/kernels.h"
#include "ops/volume.h"

namespace voxgrad {
namespace {

/// The gradients or one state of all parameters.
struct List {
  const char* what;
  TensorSpan tensors;
  bool used = true, written = true;
};

void check_lists(const char* op, TensorSpan params, std::initializer_list<List> lists) {
  for (size_t i = 0; i < params.size(); ++i) {
    check(params[i].defined(), op, "parameter ", i, " is undefined");
    check(is_floating(params[i].dtype()), op, "parameters must have a floating dtype, parameter ", i, " is ",
          describe(params[i]));
    check(params[i].is_contiguous(), op, "parameter ", i, " is not contiguous: ", describe(params[i]));
  }
  for (const List& list : lists) {
    const size_t expected = list.used ? params.size() : 0;
    check(list.tensors.size() == expected, op, "expected ", expected, ' ', list.what, ", got ", list.tensors.size());
    for (size_t i = 0; i < expected; ++i) {
      const Tensor &param = params[i], &tensor = list.tensors[i];
      const DType dtype = list.written && is_half(param.dtype()) ? f32 : param.dtype();
      const bool fits = tensor.defined() && tensor.shape() == param.shape() && tensor.dtype() == dtype &&
                        tensor.device() == param.device() && (!list.written || tensor.is_contiguous());
      check(fits, op, "parameter ", i, " is ", describe(param), ", its entry in ", list.what, " is ", describe(tensor),
            list.written && tensor.defined() && !tensor.is_contiguous() ? ", not contiguous" : "");
    }
  }
}

/// The address of the one element of `number`, which may be null.
template <class T>
T* address(const char* op, const char* what, const Tensor* number, Device device) {
  if (!number) return nullptr;
  const bool fits = number->defined() && number->dtype() == dtype_of<std::remove_const_t<T>> && number->numel() == 1 &&
                    number->device() == device;
  check(fits, op, what, " must be one ", dtype_of<std::remove_const_t<T>>, " on ", device, ", got ", describe(*number));
  return (std::is_const_v<T> ? number->view_in() : number->view_out()).template as<T>();
}

/// Calls the kernel for every stretch of parameters of one device and dtype; states[k] may be empty.
void run(const char* op, TensorSpan params, TensorSpan grads, std::initializer_list<TensorSpan> states,
         const AnyStep& step, const StepScaling& scaling = {}, bool reads_params = false) {
  NoGradGuard no_grad;
  StepGate gate;
  if (!params.empty())
    gate = {address<const float>(op, "scale", scaling.scale, params[0].device()),
            address<const int64_t>(op, "found_inf", scaling.found_inf, params[0].device()),
            address<const int64_t>(op, "skipped", scaling.skipped, params[0].device())};
  for (const Tensor& param : params)
    check((!gate.scale && !gate.found_inf && !gate.skipped) || param.device() == params[0].device(), op,
          "with gradient scaling all parameters must lie on one device, got ", params[0].device(), " and ",
          param.device());
  Tensors dense;  // gradients, for as long as the kernels are being called
  std::vector<StepViews> list;
  for (size_t i = 0; i < params.size(); ++i) {
    dense.push_back(grads[i].contiguous());
    const View param = reads_params ? params[i].view_in() : params[i].view_out();
    StepViews& views = list.emplace_back(StepViews{param, dense.back().view_in(), {}});
    size_t k = 0;
    for (const TensorSpan& state : states) {
      if (!state.empty()) views.state[k] = state[i].view_out();
      ++k;
    }
    const bool more = i + 1 < params.size() && params[i + 1].device() == params[i].device() &&
                      params[i + 1].dtype() == params[i].dtype();
    if (more) continue;
    kernels(params[i].device()).step(op, list, step, gate);
    list.clear();
  }
}

}  // namespace

void sgd_step(TensorSpan params, TensorSpan grads, TensorSpan momentum_buffers, const SgdStep& step,
              const StepScaling& scaling) {
  check_lists("sgd_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "momentum_buffers", .tensors = momentum_buffers, .used = step.momentum != 0}});
  run("sgd_step", params, grads, {momentum_buffers}, step, scaling);
}

void adam_step(TensorSpan params, TensorSpan grads, TensorSpan exp_avgs, TensorSpan exp_avg_sqs,
               TensorSpan max_exp_avg_sqs, const AdamStep& step, const StepScaling& scaling) {
  check(step.step > 0, "adam_step", "steps count from 1, got ", step.step);
  check_lists("adam_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "exp_avgs", .tensors = exp_avgs},
               {.what = "exp_avg_sqs", .tensors = exp_avg_sqs},
               {.what = "max_exp_avg_sqs", .tensors = max_exp_avg_sqs, .used = step.amsgrad}});
  run("adam_step", params, grads, {exp_avgs, exp_avg_sqs, max_exp_avg_sqs}, step, scaling);
}

void rmsprop_step(TensorSpan params, TensorSpan grads, TensorSpan square_avgs, TensorSpan momentum_buffers,
                  TensorSpan grad_avgs, const RmspropStep& step, const StepScaling& scaling) {
  check_lists("rmsprop_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "square_avgs", .tensors = square_avgs},
               {.what = "momentum_buffers", .tensors = momentum_buffers, .used = step.momentum != 0},
               {.what = "grad_avgs", .tensors = grad_avgs, .used = step.centered}});
  run("rmsprop_step", params, grads, {square_avgs, momentum_buffers, grad_avgs}, step, scaling);
}

void adagrad_step(TensorSpan params, TensorSpan grads, TensorSpan sums, const AdagradStep& step,
                  const StepScaling& scaling) {
  check(step.step > 0, "adagrad_step", "steps count from 1, got ", step.step);
  check_lists("adagrad_step", params,
              {{.what = "gradients", .tensors = grads, .written = false}, {.what = "sums", .tensors = sums}});
  run("adagrad_step", params, grads, {sums}, step, scaling);
}

void lion_step(TensorSpan params, TensorSpan grads, TensorSpan exp_avgs, const LionStep& step,
               const StepScaling& scaling) {
  check_lists("lion_step", params,
              {{.what = "gradients", .tensors = grads, .written = false}, {.what = "exp_avgs", .tensors = exp_avgs}});
  run("lion_step", params, grads, {exp_avgs}, step, scaling);
}

void ema_step(TensorSpan params, TensorSpan averages, const EmaStep& step) {
  check_lists("ema_step", params, {{.what = "averages", .tensors = averages}});
  run("ema_step", params, params, {averages}, step, {}, true);
}

void unscale_gradients(TensorSpan grads, const Tensor& found_inf, const Tensor* scale) {
  constexpr const char* kOp = "unscale_gradients";
  NoGradGuard no_grad;
  Tensors dense;
  for (const Tensor& grad : grads) {
    check(grad.defined() && is_floating(grad.dtype()) && grad.device() == found_inf.device(), kOp,
          "gradients must be floating, on the device of found_inf (", describe(found_inf), "), got ", describe(grad));
    dense.push_back(grad.contiguous());
  }
  auto* found = address<int64_t>(kOp, "found_inf", &found_inf, found_inf.device());
  run(kOp, dense, dense, {}, UnscaleStep{found, scale != nullptr}, {.scale = scale}, scale == nullptr);
  for (size_t i = 0; scale && i < grads.size(); ++i)
    if (!dense[i].is_same(grads[i])) grads[i].copy_(dense[i]);
}

}  // namespace voxgrad
