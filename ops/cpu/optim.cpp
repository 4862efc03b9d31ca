// Optimizer steps: the updates of ops/optim_step.h over contiguous arrays.
#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/optim_step.h"

namespace voxgrad::cpu {
namespace {

/// Calls step(i) for every element of `param`, in pieces that do not depend on the number of threads.
template <class F>
void for_each_element(const View& param, F step) {
  const int64_t count = param.numel(), pieces = (count + kRowPiece - 1) / kRowPiece;
  parallel_for(pieces, grain_of(kRowPiece), [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kRowPiece, count);
    VG_INDEPENDENT
    for (int64_t i = begin * kRowPiece; i < last; ++i) step(i);
  });
}

/// Calls body(views, element of the params' type) for every parameter.
template <class F>
void for_each_param(const char* op, std::span<const StepViews> params, const F& body) {
  for (const StepViews& views : params)
    dispatch(WideFloats(), views.param.dtype, op, "CPU", [&]<class T>() { body(views, T()); });
}

}  // namespace

void sgd(std::span<const StepViews> params, const SgdStep& step) {
  for_each_param("sgd", params, [&]<class T>(const StepViews& views, T) {
    const SgdUpdate<T> update(step);
    T *p = views.param.as<T>(), *buffer = views.state[0].as<T>();
    const T* g = views.grad.as<const T>();
    if (step.momentum != 0)
      for_each_element(views.param, [=](int64_t i) { update(p[i], g[i], buffer[i]); });
    else
      for_each_element(views.param, [=](int64_t i) { update(p[i], g[i]); });
  });
}

void adam(std::span<const StepViews> params, const AdamStep& step) {
  for_each_param("adam", params, [&]<class T>(const StepViews& views, T) {
    const AdamUpdate<T> update(step);
    T *p = views.param.as<T>(), *m = views.state[0].as<T>(), *v = views.state[1].as<T>(), *top = views.state[2].as<T>();
    const T* g = views.grad.as<const T>();
    if (step.amsgrad)
      for_each_element(views.param, [=](int64_t i) { update(p[i], g[i], m[i], v[i], top[i]); });
    else
      for_each_element(views.param, [=](int64_t i) { update(p[i], g[i], m[i], v[i]); });
  });
}

void rmsprop(std::span<const StepViews> params, const RmspropStep& step) {
  for_each_param("rmsprop", params, [&]<class T>(const StepViews& views, T) {
    const RmspropUpdate<T> update(step);
    T *p = views.param.as<T>(), *s = views.state[0].as<T>();
    T* buffer = step.momentum != 0 ? views.state[1].as<T>() : nullptr;
    T* average = step.centered ? views.state[2].as<T>() : nullptr;
    const T* g = views.grad.as<const T>();
    for_each_element(views.param, [=](int64_t i) {
      update(p[i], g[i], s[i], buffer ? buffer + i : nullptr, average ? average + i : nullptr);
    });
  });
}

}  // namespace voxgrad::cpu
