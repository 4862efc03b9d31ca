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

template <class T>
T* data_of(const View* v) {
  return v ? v->as<T>() : nullptr;
}

}  // namespace

void sgd(const View& param, const View& grad, const View* momentum, const SgdStep& step) {
  dispatch<float, double>(param.dtype, "sgd", "CPU", [&]<class T>() {
    const SgdUpdate<T> update(step);
    T *p = param.as<T>(), *buffer = data_of<T>(momentum);
    const T* g = grad.as<const T>();
    if (buffer)
      for_each_element(param, [=](int64_t i) { update(p[i], g[i], buffer[i]); });
    else
      for_each_element(param, [=](int64_t i) { update(p[i], g[i]); });
  });
}

void adam(const View& param, const View& grad, const View& exp_avg, const View& exp_avg_sq, const View* max_exp_avg_sq,
          const AdamStep& step) {
  dispatch<float, double>(param.dtype, "adam", "CPU", [&]<class T>() {
    const AdamUpdate<T> update(step);
    T *p = param.as<T>(), *m = exp_avg.as<T>(), *v = exp_avg_sq.as<T>(), *top = data_of<T>(max_exp_avg_sq);
    const T* g = grad.as<const T>();
    if (top)
      for_each_element(param, [=](int64_t i) { update(p[i], g[i], m[i], v[i], top[i]); });
    else
      for_each_element(param, [=](int64_t i) { update(p[i], g[i], m[i], v[i]); });
  });
}

void rmsprop(const View& param, const View& grad, const View& square_avg, const View* momentum, const View* grad_avg,
             const RmspropStep& step) {
  dispatch<float, double>(param.dtype, "rmsprop", "CPU", [&]<class T>() {
    const RmspropUpdate<T> update(step);
    T *p = param.as<T>(), *s = square_avg.as<T>(), *buffer = data_of<T>(momentum), *average = data_of<T>(grad_avg);
    const T* g = grad.as<const T>();
    for_each_element(param, [=](int64_t i) {
      update(p[i], g[i], s[i], buffer ? buffer + i : nullptr, average ? average + i : nullptr);
    });
  });
}

}  // namespace voxgrad::cpu
