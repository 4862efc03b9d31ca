// Optimizer steps, with the updates of ops/detail/optim_step.h, and sum_of_squares.
#include <numeric>
#include <vector>

#include "ops/cpu/loops.h"
#include "ops/detail/optim_step.h"

namespace voxgrad::cpu {
namespace {

/// Calls step(i) for every element of `param`, in parallel.
template <class F>
void for_each_element(const View& param, F step) {
  const int64_t count = param.numel(), pieces = divide_up(count, kRowPiece);
  parallel_for(pieces, grain_of(kRowPiece), [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kRowPiece, count);
    VG_INDEPENDENT
    for (int64_t i = begin * kRowPiece; i < last; ++i) step(i);
  });
}

/// Updates all parameters, which may have different dtypes.
template <class Step>
void step_all(const char* op, std::span<const StepViews> params, const Step& step, float unscale) {
  for (const StepViews& views : params)
    dispatch(Floats(), views.param.dtype, op, "CPU", [&]<class T>() {
      using C = compute_t<T>;
      with_update<C>(step, [&]<size_t n>(const auto& update) {
        [&]<size_t... k>(std::index_sequence<k...>) {
          T* p = views.param.as<T>();
          const T* g = views.grad.as<const T>();
          const std::array<C*, n> s{views.state[k].template as<C>()...};
          for_each_element(views.param, [=, c = static_cast<C>(unscale)](int64_t i) {
            update_element(update, c, p[i], g[i], s[k][i]...);
          });
        }
        (std::make_index_sequence<n>());
      });
    });
}

}  // namespace

void step(const char* op, std::span<const StepViews> params, const AnyStep& step, const StepGate& gate) {
  if (gate.found_inf && *gate.found_inf) return;
  std::visit(
      [&](auto options) {
        if constexpr (requires { options.step; })
          if (gate.skipped) options.step -= *gate.skipped;
        step_all(op, params, options, inverse_scale(gate.scale));
      },
      step);
}

void sum_of_squares(const View& out, std::span<const View> list) {
  double total = 0;
  for (const View& view : list)
    dispatch(Floats(), view.dtype, "sum_of_squares", "CPU", [&]<class T>() {
      const T* const x = view.as<const T>();
      const int64_t count = view.numel(), pieces = divide_up(count, kRowPiece);
      std::vector<double> sums(static_cast<size_t>(pieces));
      parallel_for(pieces, grain_of(kRowPiece), [&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t last = std::min((piece + 1) * kRowPiece, count);
          double sum = 0;
          for (int64_t i = piece * kRowPiece; i < last; ++i) {
            const auto value = convert<double>(x[i]);
            sum += value * value;
          }
          sums[static_cast<size_t>(piece)] = sum;
        }
      });
      total = std::accumulate(sums.begin(), sums.end(), total);
    });
  *out.as<double>() = total;
}

}  // namespace voxgrad::cpu
