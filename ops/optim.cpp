#include "ops/optim.h"

#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/kernels.h"
#include "ops/volume.h"

namespace voxgrad {
namespace {

using TensorSpan = std::span<const Tensor>;

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
      const bool fits = tensor.defined() && tensor.shape() == param.shape() && tensor.dtype() == param.dtype() &&
                        tensor.device() == param.device() && (!list.written || tensor.is_contiguous());
      check(fits, op, "parameter ", i, " is ", describe(param), ", its entry in ", list.what, " is ", describe(tensor),
            list.written && tensor.defined() && !tensor.is_contiguous() ? ", not contiguous" : "");
    }
  }
}

/// Calls step(kernels, list) for every stretch of parameters of one device and dtype; states[k] may be empty.
template <class F>
void for_each_list(TensorSpan params, TensorSpan grads, std::initializer_list<TensorSpan> states, F step) {
  NoGradGuard no_grad;
  Tensors dense;  // gradients, for as long as the kernels are being called
  std::vector<StepViews> list;
  for (size_t i = 0; i < params.size(); ++i) {
    dense.push_back(grads[i].contiguous());
    StepViews& views = list.emplace_back(StepViews{params[i].view_out(), dense.back().view_in(), {}});
    size_t k = 0;
    for (const TensorSpan& state : states) {
      if (!state.empty()) views.state[k] = state[i].view_out();
      ++k;
    }
    const bool more = i + 1 < params.size() && params[i + 1].device() == params[i].device() &&
                      params[i + 1].dtype() == params[i].dtype();
    if (more) continue;
    step(kernels(params[i].device()), std::span<const StepViews>(list));
    list.clear();
  }
}

}  // namespace

void sgd_step(TensorSpan params, TensorSpan grads, TensorSpan momentum_buffers, const SgdStep& step) {
  check_lists("sgd_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "momentum_buffers", .tensors = momentum_buffers, .used = step.momentum != 0}});
  for_each_list(params, grads, {momentum_buffers}, [&](const Kernels& device, auto list) { device.sgd(list, step); });
}

void adam_step(TensorSpan params, TensorSpan grads, TensorSpan exp_avgs, TensorSpan exp_avg_sqs,
               TensorSpan max_exp_avg_sqs, const AdamStep& step) {
  check(step.step > 0, "adam_step", "steps count from 1, got ", step.step);
  check_lists("adam_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "exp_avgs", .tensors = exp_avgs},
               {.what = "exp_avg_sqs", .tensors = exp_avg_sqs},
               {.what = "max_exp_avg_sqs", .tensors = max_exp_avg_sqs, .used = step.amsgrad}});
  for_each_list(params, grads, {exp_avgs, exp_avg_sqs, max_exp_avg_sqs},
                [&](const Kernels& device, auto list) { device.adam(list, step); });
}

void rmsprop_step(TensorSpan params, TensorSpan grads, TensorSpan square_avgs, TensorSpan momentum_buffers,
                  TensorSpan grad_avgs, const RmspropStep& step) {
  check_lists("rmsprop_step", params,
              {{.what = "gradients", .tensors = grads, .written = false},
               {.what = "square_avgs", .tensors = square_avgs},
               {.what = "momentum_buffers", .tensors = momentum_buffers, .used = step.momentum != 0},
               {.what = "grad_avgs", .tensors = grad_avgs, .used = step.centered}});
  for_each_list(params, grads, {square_avgs, momentum_buffers, grad_avgs},
                [&](const Kernels& device, auto list) { device.rmsprop(list, step); });
}

}  // namespace voxgrad
