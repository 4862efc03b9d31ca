// The functions of ops/optim.h: checks of the arguments, and calls of the kernels.
#include "ops/optim.h"

#include <algorithm>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// A list of tensors with one entry for each parameter.
struct List {
  const char* what;  // name in error messages
  bool used = true;  // false: the list must be empty
  TensorSpan tensors{};
};
using Lists = std::vector<List>;

/// The name of a step and the lists of its states.
struct Form {
  const char* op;
  Lists states;
};
Form form_of(const SgdStep& s) { return {"sgd_step", {{"momentum_buffers", s.momentum != 0}}}; }
Form form_of(const AdamStep& s) {
  return {"adam_step", {{"exp_avgs"}, {"exp_avg_sqs"}, {"max_exp_avg_sqs", s.amsgrad}}};
}
Form form_of(const RmspropStep& s) {
  return {"rmsprop_step", {{"square_avgs"}, {"momentum_buffers", s.momentum != 0}, {"grad_avgs", s.centered}}};
}
Form form_of(const AdagradStep&) { return {"adagrad_step", {{"sums"}}}; }
Form form_of(const LionStep&) { return {"lion_step", {{"exp_avgs"}}}; }
Form form_of(const EmaStep&) { return {"ema_step", {{"averages"}}}; }
template <class Step>
Form form_of(const Step&) {
  return {"optimizer_step", {}};
}

/// Checks that a list of gradients or of states matches the parameters.
void check_list(const char* op, TensorSpan params, const List& list, bool is_state) {
  const size_t expected = list.used ? params.size() : 0;
  check(list.tensors.size() == expected, op, "the number of ", list.what, " must be ", expected, ", got ",
        list.tensors.size());
  for (size_t i = 0; i < expected; ++i) {
    const Tensor &param = params[i], &tensor = list.tensors[i];
    const DType dtype = is_state ? widened(param.dtype()) : param.dtype();
    const bool fits = tensor.defined() && tensor.shape() == param.shape() && tensor.dtype() == dtype &&
                      tensor.device() == param.device();
    const bool has_format = !is_state || !fits || tensor.is_contiguous(param.suggest_memory_format());
    check(fits && has_format, op, "parameter ", i, " is ", describe(param), ", but its entry in ", list.what, " is ",
          describe(tensor), has_format ? "" : ", in another memory format");
  }
}

void check_params(const char* op, TensorSpan params) {
  for (size_t i = 0; i < params.size(); ++i) {
    check(params[i].defined(), op, "parameter ", i, " is undefined");
    check(is_floating(params[i].dtype()), op, "parameters must have a floating-point dtype, parameter ", i, " is ",
          describe(params[i]));
    check(is_dense_volume(params[i]), op, "parameter ", i,
          " is neither contiguous nor channels_last: ", describe(params[i]));
  }
}

/// Checks that `number` has one element of type T on `device`. Returns its address, or null if `number` is null.
template <class T>
T* address(const char* op, const char* what, const Tensor* number, Device device) {
  if (!number) return nullptr;
  const bool fits = number->defined() && number->dtype() == dtype_of<std::remove_const_t<T>> && number->numel() == 1 &&
                    number->device() == device;
  check(fits, op, what, " must have one element of dtype ", dtype_of<std::remove_const_t<T>>, " on ", device, ", got ",
        describe(*number));
  return (std::is_const_v<T> ? number->view_in() : number->view_out()).template as<T>();
}

/// Returns true if element i of a list is followed by a tensor with the same device and dtype.
bool is_followed_by_same_kind(TensorSpan list, size_t i) {
  return i + 1 < list.size() && list[i + 1].device() == list[i].device() && list[i + 1].dtype() == list[i].dtype();
}

/// Checks all arguments, then calls the kernel once for each sequence of consecutive parameters with the same device
/// and dtype. `read_only`: the step does not modify the parameters.
void run(const char* op, TensorSpan params, TensorSpan grads, const Lists& states, const AnyStep& step,
         const StepScaling& scaling = {}, bool read_only = false) {
  const auto check_number = [&](const auto& options) {
    if constexpr (requires { options.step; })
      check(options.step > 0, op, "step must be at least 1, got ", options.step);
  };
  std::visit(check_number, step);
  check_params(op, params);
  check_list(op, params, {"gradients", true, grads}, false);
  for (const List& list : states) check_list(op, params, list, true);
  NoGradGuard no_grad;
  StepGate gate;
  if (!params.empty())
    gate = {address<const float>(op, "scale", scaling.scale, params[0].device()),
            address<const int64_t>(op, "found_inf", scaling.found_inf, params[0].device()),
            address<const int64_t>(op, "skipped", scaling.skipped, params[0].device())};
  for (const Tensor& param : params)
    check((!gate.scale && !gate.found_inf && !gate.skipped) || param.device() == params[0].device(), op,
          "gradient scaling requires all parameters to be on the same device, got ", params[0].device(), " and ",
          param.device());
  Tensors dense;  // owns the gradients until the kernels have been called
  std::vector<StepViews> list;
  for (size_t i = 0; i < params.size(); ++i) {
    dense.push_back(grads[i].contiguous(params[i].suggest_memory_format()));
    const View param = read_only ? params[i].view_in() : params[i].view_out();
    StepViews& views = list.emplace_back(StepViews{param, dense.back().view_in(), {}});
    size_t k = 0;
    for (const List& state : states)
      if (state.used) views.state[k++] = state.tensors[i].view_out();
    if (is_followed_by_same_kind(params, i)) continue;
    kernels(params[i].device()).step(op, list, step, gate);
    list.clear();
  }
}

/// Returns the tensors, each replaced by a dense copy if it is not dense.
Tensors dense_copies(TensorSpan tensors) {
  Tensors dense;
  for (const Tensor& tensor : tensors) dense.push_back(tensor.contiguous(tensor.suggest_memory_format()));
  return dense;
}

/// Calls step(dense_copies(tensors)), then writes the copies back to the tensors that are not dense.
template <class F>
void in_place(TensorSpan tensors, const F& step) {
  const Tensors dense = dense_copies(tensors);
  step(dense);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!dense[i].is_same(tensors[i])) tensors[i].copy_(dense[i]);
}

}  // namespace

void optimizer_step(TensorSpan params, TensorSpan grads, std::initializer_list<TensorSpan> states, const AnyStep& step,
                    const StepScaling& scaling) {
  Form form = std::visit([](const auto& options) { return form_of(options); }, step);
  form.states.resize(std::max(form.states.size(), states.size()), {"further states", false});
  for (size_t i = 0; const TensorSpan list : states) form.states[i++].tensors = list;
  run(form.op, params, grads, form.states, step, scaling, std::holds_alternative<EmaStep>(step));
}

void unscale_gradients(TensorSpan grads, const Tensor& found_inf, const Tensor& scale, bool write) {
  constexpr const char* kOp = "unscale_gradients";
  NoGradGuard no_grad;
  for (const Tensor& grad : grads)
    check(grad.defined() && is_floating(grad.dtype()) && grad.device() == found_inf.device(), kOp,
          "gradients must be floating, on the device of found_inf (", describe(found_inf), "), got ", describe(grad));
  auto* found = address<int64_t>(kOp, "found_inf", &found_inf, found_inf.device());
  const auto step = [&](const Tensors& dense) {
    run(kOp, dense, dense, {}, UnscaleStep{found, write}, {.scale = &scale}, !write);
  };
  if (write)
    in_place(grads, step);
  else
    step(dense_copies(grads));
}

Tensor sum_of_squares(TensorSpan grads) {
  constexpr const char* kOp = "sum_of_squares";
  NoGradGuard no_grad;
  check(!grads.empty(), kOp, "the list of gradients is empty");
  const Tensors dense = dense_copies(grads);
  check_params(kOp, dense);
  Tensors sums;
  std::vector<View> list;
  for (size_t i = 0; i < dense.size(); ++i) {
    list.push_back(dense[i].view_in());
    if (is_followed_by_same_kind(dense, i)) continue;
    sums.push_back(empty({}, {f64, dense[i].device()}));
    kernels(dense[i].device()).sum_of_squares(sums.back().view_out(), list);
    list.clear();
  }
  Tensor sum = sums[0];
  for (size_t i = 1; i < sums.size(); ++i) sum = sum.add(sums[i].to(sum.device()));
  return sum;
}

void scale_gradients(TensorSpan grads, const Tensor& factor) {
  constexpr const char* kOp = "scale_gradients";
  NoGradGuard no_grad;
  const auto scale_on_device = [&](TensorSpan part) {
    const Tensor local_factor = factor.to(part[0].device());
    const ScaleStep step{address<const double>(kOp, "factor", &local_factor, local_factor.device())};
    in_place(part, [&](const Tensors& dense) { run(kOp, dense, dense, {}, step); });
  };
  for (size_t begin = 0, end; begin < grads.size(); begin = end) {
    for (end = begin + 1; end < grads.size() && grads[end].device() == grads[begin].device();) ++end;
    scale_on_device(grads.subspan(begin, end - begin));
  }
}

void scaled_copies(TensorSpan targets, TensorSpan sources, double factor) {
  run("scaled_copies", targets, sources, {}, CopyStep{factor});
}

}  // namespace voxgrad
