// Group normalization, and activations with sums per channel in their gradients: prelu and its gradient, and the
// gradient of gelu.
//
// Both passes of a normalization first compute sums for each line, which is a channel of a sample. Then they compute
// coefficients for each line, and finally all elements.
//
// The statistics are computed from deviations from one element of the group (the pivot). This avoids the difference of
// two large squares. Elements are converted when they are loaded and stored. Sums are in double, coefficients in
// compute_t.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "ops/cpu/slabs.h"
#include "ops/detail/norm_activations.h"

namespace voxgrad::cpu {
namespace {

/// Two f64 values of a group: (mean, rstd) in the statistics, or the two means that the backward pass computes.
using Pair = std::array<double, 2>;
Pair& pair_at(const View& pairs, const Group& group) { return pairs.as<Pair>()[group.number]; }

/// The normalization of a line: (v - mean) * factor + term with v = before(x). The rounding error of the mean is part
/// of `term`, so that the subtraction is accurate even if the mean is large compared with the deviations.
template <class T>
struct LineNorm {
  T mean;
  T factor;
  T term;

  template <class Activations>
  T centered(const Activations& a, T x) const {
    return a.before.value(x) - mean;
  }
  T normalized(T centered) const { return centered * factor + term; }
};

/// Returns the difference between the mean of a group and the mean rounded to type T.
template <class T>
double rest_of(double mean) {
  return mean - static_cast<double>(static_cast<T>(mean));
}

template <class T>
std::vector<LineNorm<T>> line_norms(const Slabs& slabs, const View& statistics, const View* gamma, const View* beta) {
  std::vector<LineNorm<T>> norms(slabs.lines());
  for_each_group(slabs, statistics, [&](const Group& group) {
    const auto [mean, rstd] = pair_at(statistics, group);
    group.for_each([&, mean = mean, rstd = rstd](int64_t n, int64_t c) {
      const double factor = rstd * entry(gamma, c, 1);
      norms[slabs.line(n, c)] = {static_cast<T>(mean), static_cast<T>(factor),
                                 static_cast<T>(entry(beta, c, 0) - rest_of<T>(mean) * factor)};
    });
  });
  return norms;
}

template <class T, class Activations>
void compute_statistics(const Slabs& slabs, const View& statistics, const View& x, double eps, const Activations& a) {
  const auto pivot_of = [&](const Group& group) {
    if (group.lines() * slabs.length == 0) return 0.0;
    const int64_t offset = group.sample * x.stride[0] + group.channel * x.stride[1];
    const View first{x.as<std::byte>() + offset * item_size(x.dtype), x.dtype, x.device, 1, {1}, {1}};
    return static_cast<double>(a.before.value(static_cast<T>(entry(&first, 0, 0))));
  };
  std::vector<double> pivots(slabs.lines());
  for_each_group(slabs, statistics, [&](const Group& group) {
    group.for_each([&, pivot = pivot_of(group)](int64_t n, int64_t c) { pivots[slabs.line(n, c)] = pivot; });
  });
  const auto sums = line_sums<T, 2>(
      slabs,
      [&a, pivot = pivots.data()](size_t line, T value, T) {
        const double deviation = static_cast<double>(a.before.value(value)) - pivot[line];
        return Pair{deviation, deviation * deviation};
      },
      x, x);
  for_each_group(slabs, statistics, [&](const Group& group) {
    const double count = static_cast<double>(std::max<int64_t>(1, group.lines() * slabs.length));
    Pair total{};
    group.for_each([&](int64_t n, int64_t c) {
      for (size_t k = 0; k < 2; ++k) total[k] += sums[slabs.line(n, c)][k];
    });
    const double shift = total[0] / count, variance = std::max(total[1] / count - shift * shift, 0.0);
    pair_at(statistics, group) = {pivot_of(group) + shift, 1 / std::sqrt(variance + eps)};
  });
}

/// Computes y = after((before(x) - mean) * rstd * gamma + beta + residual). `residual` may be null.
template <class T, class Activations>
void apply_norm(const Slabs& slabs, const View& y, const View& x, const View& statistics, const View* gamma,
                const View* beta, const View* residual, const Activations& a) {
  const auto norms = line_norms<T>(slabs, statistics, gamma, beta);
  if (residual)
    return map_channels<T>(
        slabs, norms,
        [a](const LineNorm<T>& norm, T v, T r) { return a.after.value(norm.normalized(norm.centered(a, v)) + r); }, y,
        x, *residual);
  map_channels<T>(
      slabs, norms,
      [a](const LineNorm<T>& norm, T v, T) { return a.after.value(norm.normalized(norm.centered(a, v))); }, y, x, x);
}

/// Let n be the normalized value, g the gradient of n * gamma + beta, and h = gamma * g the gradient of n. Computes
/// dgamma and dbeta, and stores the mean of h and the mean of h * n over each group in `means`.
template <class T, class Activations>
void sum_gradients(const Slabs& slabs, const std::vector<LineNorm<T>>& norms, const View& means,
                   const GroupNormGradients& out, const View& dy, const View& x, const View& statistics,
                   const View* gamma, const Activations& a) {
  auto sums = line_sums<T, 2>(
      slabs,
      [&a, norm = norms.data()](size_t line, T d, T v) {
        const T centered = norm[line].centered(a, v), g = a.after.gradient(d, norm[line].normalized(centered));
        return Pair{double{g}, double{g} * double{centered}};
      },
      dy, x);
  for_each_group(slabs, statistics, [&](const Group& group) {
    const auto [mean, rstd] = pair_at(statistics, group);
    const double count = static_cast<double>(std::max<int64_t>(1, group.lines() * slabs.length));
    Pair total{};
    group.for_each([&, mean = mean, rstd = rstd](int64_t n, int64_t c) {
      auto& [g, g_normal] = sums[slabs.line(n, c)];
      g_normal = (g_normal - rest_of<T>(mean) * g) * rstd;  // the sum of g * n
      const double weight = entry(gamma, c, 1) / count;
      total[0] += weight * g;
      total[1] += weight * g_normal;
    });
    pair_at(means, group) = total;
  });
  for (int64_t c = 0; c < slabs.channels; ++c) {
    Pair total{};
    for (int64_t n = 0; n < slabs.samples; ++n)
      for (size_t k = 0; k < 2; ++k) total[k] += sums[slabs.line(n, c)][k];
    set_entry(out.dbeta, c, total[0]);
    set_entry(out.dgamma, c, total[1]);
  }
}

/// Computes dx from dv, the gradient of v = before(x): dv = rstd * (h - mean(h) - n * mean(h * n)), with n and h as in
/// sum_gradients().
template <class T, class Activations>
void input_gradient(const Slabs& slabs, const std::vector<LineNorm<T>>& norms, const View& dx, const View& dy,
                    const View& x, const View& statistics, const View& means, const Activations& a) {
  struct Coefficients {
    LineNorm<T> norm;
    T slope;
    T offset;
  };
  std::vector<Coefficients> coefficients(slabs.lines());
  for_each_group(slabs, statistics, [&](const Group& group) {
    const auto [mean, rstd] = pair_at(statistics, group);
    const auto [mean_h, mean_hn] = pair_at(means, group);
    const double slope = -rstd * rstd * mean_hn, offset = -rstd * mean_h - rest_of<T>(mean) * slope;
    group.for_each([&](int64_t n, int64_t c) {
      const size_t line = slabs.line(n, c);
      coefficients[line] = {norms[line], static_cast<T>(slope), static_cast<T>(offset)};
    });
  });
  map_channels<T>(
      slabs, coefficients,
      [a](const Coefficients& k, T d, T v) {
        const T centered = k.norm.centered(a, v), g = a.after.gradient(d, k.norm.normalized(centered));
        return a.before.gradient(g * k.norm.factor + (centered * k.slope + k.offset), v);
      },
      dx, dy, x);
}

/// Returns the slope of each channel of each sample.
template <class T>
std::vector<T> slopes(const Slabs& slabs, const View& weight) {
  std::vector<T> result(static_cast<size_t>(slabs.samples * slabs.channels));
  for (size_t i = 0; i < result.size(); ++i)
    result[i] = static_cast<T>(entry(&weight, static_cast<int64_t>(i) % slabs.channels, 0));
  return result;
}

}  // namespace

void group_norm(const View& y, const View& statistics, const View& x, const View* gamma, const View* beta,
                const View* residual, double eps, const NormActivations& activations, const JoinRanks* join) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "group_norm", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    with_activations<C>(activations, [&](const auto& a) {
      compute_statistics<C>(slabs, statistics, x, eps, a);
      if (join) (*join)();
      apply_norm<C>(slabs, y, x, statistics, gamma, beta, residual, a);
    });
  });
}

void normalize(const View& y, const View& x, const View& statistics, const View* gamma, const View* beta) {
  dispatch(Floats(), x.dtype, "normalize", "CPU", [&]<class T>() {
    apply_norm<compute_t<T>>(Slabs(x), y, x, statistics, gamma, beta, nullptr, NoActivations({}));
  });
}

void group_norm_backward(const GroupNormGradients& out, const View& means, const View& dy, const View& x,
                         const View& statistics, const View* gamma, const View* beta,
                         const NormActivations& activations, const JoinRanks* join) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "group_norm_backward", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    const auto norms = line_norms<C>(slabs, statistics, gamma, beta);
    with_activations<C>(activations, [&](const auto& a) {
      sum_gradients(slabs, norms, means, out, dy, x, statistics, gamma, a);
      if (join) (*join)();
      input_gradient(slabs, norms, out.dx, dy, x, statistics, means, a);
    });
  });
  if (out.sums_are_zero(statistics.size[1], activations))
    for (int64_t c = 0; c < slabs.channels; ++c) set_entry(out.sums, c, 0);
  else if (out.sums)
    sum_channels(slabs, *out.sums, out.dx);
}

void track_statistics(const View* running_mean, const View* running_var, const View& statistics, double eps,
                      double count, const View* counts, double momentum) {
  if (counts) {
    count = 0;
    for (int64_t rank = 0; rank < counts->size[0]; ++rank)
      count += counts->as<const double>()[rank * counts->stride[0]];
  }
  if (count <= 1) return;  // the unbiased variance is undefined
  const auto update = [&](const View* running, int64_t c, double value) {
    const double old = entry(running, c, 0);
    set_entry(running, c, old + momentum * (value - old));
  };
  for (int64_t c = 0; c < statistics.size[1]; ++c) {
    const auto [mean, rstd] = statistics.as<const Pair>()[c];
    update(running_mean, c, mean);
    update(running_var, c, std::max(1 / (rstd * rstd) - eps, 0.0) * (count / (count - 1)));
  }
}

void prelu(const View& y, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    map_channels<C>(
        slabs, slopes<C>(slabs, weight), [](C slope, C v, C) { return v > 0 ? v : slope * v; }, y, x, x);
  });
}

void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu_backward", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    map_channels<C>(
        slabs, slopes<C>(slabs, weight), [](C slope, C d, C v) { return v > 0 ? d : slope * d; }, dx, dy, x);
    sum_channels<C>(
        slabs, dweight, [](size_t, C d, C v) { return v > 0 ? 0 : double{d} * double{v}; }, dy, x);
  });
}

void gelu_backward(const View& y, const View& dx, const View& sums, const View& dy, const View& x) {
  unary(UnaryOp::gelu, y, x, 0, 0);
  binary(BinaryOp::gelu_grad, dx, dy, x, 0, 0);
  sum_channels(Slabs(dx), sums, dx);
}

}  // namespace voxgrad::cpu
