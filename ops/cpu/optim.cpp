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

/// Steps all parameters, of whatever types.
template <class Step>
void step_all(const char* op, std::span<const StepViews> params, const Step& step) {
  for (const StepViews& views : params)
    dispatch(Floats(), views.param.dtype, op, "CPU", [&]<class T>() {
      with_update<compute_t<T>>(step, [&]<size_t n>(const auto& update, const std::array<int, n>& states) {
        [&]<size_t... k>(std::index_sequence<k...>) {
          T* p = views.param.as<T>();
          const T* g = views.grad.as<const T>();
          const std::array<T*, n> s{views.state[states[k]].template as<T>()...};
          for_each_element(views.param, [=](int64_t i) { update_element(update, p[i], g[i], s[k][i]...); });
        }
        (std::make_index_sequence<n>());
      });
    });
}

}  // namespace

void sgd(std::span<const StepViews> params, const SgdStep& step) { step_all("sgd", params, step); }
void adam(std::span<const StepViews> params, const AdamStep& step) { step_all("adam", params, step); }
void rmsprop(std::span<const StepViews> params, const RmspropStep& step) { step_all("rmsprop", params, step); }

}  // namespace voxgrad::cpu
