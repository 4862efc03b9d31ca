// Group normalization, forward: mean and variance of every group, then the normalized values.
//
// The algorithm does not compute the variance from the mean of the squares and the square of the mean, because their
// difference would lose digits if the mean is large. Instead, each thread chooses a pivot, an element at the start of
// its range. The thread sums the deviations of its elements from the pivot, and the squares of these deviations. Then
// the thread converts both sums to deviations from the first element of the channel, so that the sums of all threads
// can be added. The moments of the channels of a group are joined with the update of Chan, Golub and LeVeque ("Updating
// formulae and a pairwise algorithm for computing sample variances", 1979). The update is computed in double and in a
// fixed order.
//
// For halves (bf16, f16), a thread sums at most 32 deviations in float before it adds this sum to its total in double.
// The relative error of the sum of squares is at most 32 * 2^-24 and does not grow with the mean. The rounding of a
// half (2^-11 or 2^-8) is far larger. Squares of bfloat16 deviations above 1e19 overflow in float; a thread with such
// sums reads its elements again and adds them in double. Squares of deviations below 1e-19 underflow to 0, which is
// harmless, because every useful eps is far larger.
#include <cmath>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/norm.cuh"

namespace voxgrad::cuda {
namespace {

/// Sums the deviations of v = before(x) from the first element of the channel, and the squares of these deviations.
template <class T, class Before>
struct Deviations {
  static constexpr FormulaTraits kTraits{.inputs = 1, .sums = true, .heavy = std::is_same_v<Before, AnyActivation>};
  using Channel = typename Run<T>::Sum;  ///< the pivot of the thread

  View x;
  Before before;

  /// Returns v at position l.
  __device__ compute_t<T> first(int64_t n, int64_t c, int64_t l) const {
    return before.value(convert<compute_t<T>>(*element<const T>(x, n, c, l)));
  }
  __device__ Channel channel(int64_t n, int64_t c, int64_t l) const { return static_cast<Channel>(first(n, c, l)); }
  template <class Sum>
  __device__ void operator()(Channel pivot, RunOf<Sum>& run, const compute_t<T> (&value)[1]) const {
    const Sum deviation = static_cast<Sum>(before.value(value[0])) - static_cast<Sum>(pivot);
    run.x += deviation;
    run.y += deviation * deviation;
  }
  /// Returns whether squares overflowed.
  static __device__ bool is_lost(const double2& total) { return !isfinite(total.y); }
  /// Shifts the sums from the pivot to the first element of the channel.
  __device__ void finish(int64_t n, int64_t c, Channel pivot, int count, double2& total) const {
    const double shift = static_cast<double>(pivot) - static_cast<double>(first(n, c, 0));
    const double all = static_cast<double>(count) * shift;
    total.y += shift * (2 * total.x + all);
    total.x += all;
  }
};

/// Moments of a set of elements.
struct Moments {
  double count;
  double mean;
  double squares;  ///< sum of squared deviations from the mean
};

/// Returns the moments of the union of two sets.
__device__ Moments join(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  if (b.count == 0) return a;
  const double delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

/// Computes the statistics of each group from the sums of Deviations. Launch: one CTA per layout.columns groups in a
/// 1-D grid-stride loop, kBlock threads per CTA. Static shared memory: kBlock moments.
template <class T, class Before>
__global__ void __launch_bounds__(kBlock)
    statistics_kernel(const __grid_constant__ Groups shape, const BlockLayout layout,
                      const __grid_constant__ Deviations<T, Before> deviations, const RangeSums sums,
                      double2* statistics, double eps) {
  wait_for_previous_kernels();
  __shared__ alignas(16) Moments shared[kBlock];
  const auto moments_of = [&](int64_t line, const double2& own, int64_t positions) -> Moments {
    const int64_t n = quotient(line, shape.channels);
    const auto pivot = static_cast<double>(deviations.first(n, line - n * shape.channels, 0));
    const auto count = static_cast<double>(positions);
    const double shift = own.x / count;
    return {count, pivot + shift, own.y - own.x * shift};
  };
  for (int64_t tile = blockIdx.x; tile * layout.columns < shape.count(); tile += gridDim.x) {
    const int64_t number = tile * layout.columns + layout.column();
    const bool inside = number < shape.count();
    Moments moments{0, 0, 0};
    if (shape.group_lines() == 1) {  // add the sums first, because join() takes longer
      const int64_t line = inside ? shape.line(number, 0) : 0;
      double2 sum{0, 0};
      for (int64_t i = layout.reducer(); inside && i < sums.ranges; i += layout.reducers)
        sum = add(sum, sums.at(line, i));
      sum = combine_reducers(sum, layout, reinterpret_cast<double2*>(shared), add);
      if (inside && shape.length > 0) moments = moments_of(line, sum, shape.length);
    } else {
      if (inside && shape.length > 0)
        for (int64_t i = layout.reducer(); i < shape.group_lines() * sums.ranges; i += layout.reducers) {
          const int64_t of_line = quotient(i, sums.ranges), range = i - of_line * sums.ranges;
          const int64_t line = shape.line(number, of_line);
          moments = join(moments, moments_of(line, sums.at(line, range), sums.count(range)));
        }
      moments = combine_reducers(moments, layout, shared, join);
    }
    if (!inside || layout.reducer() > 0) continue;
    // Rounding may make the sum of squared deviations from the mean slightly negative.
    const double variance = fmax(moments.squares, 0.0) / fmax(moments.count, 1.0);
    const double scale = moments.squares == moments.squares ? 1 / sqrt(variance + eps) : moments.squares;
    statistics[number] = {moments.mean, scale};
  }
}

/// Computes y = after((before(x) - mean) * rstd * gamma + beta), or with kResidual, y = after(... + residual). The
/// inputs are x and the residual.
template <class T, class Activations, bool kResidual>
struct Normalize {
  static constexpr FormulaTraits kTraits{
      .inputs = kResidual ? 2 : 1, .writes = true, .scalar = std::is_same_v<Activations, AnyActivations>};
  using Norm = Normalization<T, Activations>;
  using Channel = typename Norm::Channel;

  Norm norm;

  __device__ Channel channel(int64_t n, int64_t c, int64_t) const { return norm.channel(n, c); }
  __device__ T operator()(const Channel& channel, Run<T>&, const compute_t<T> (&x)[kTraits.inputs]) const {
    compute_t<T> u = norm.normalized(channel, norm.centered(channel, x[0]));
    if constexpr (kResidual) u += x[1];
    return convert<T>(norm.activations.after.value(u));
  }
};

/// Applies Normalize with the given statistics. `residual` may be null.
template <class T, class Activations>
void apply_norm(const char* op, const View& y, const View& x, const View& statistics, const View* gamma,
                const View* beta, const View* residual, const Activations& activations, const Launch& launch) {
  const Normalization<T, Activations> norm{Groups(x, statistics), statistics.as<const double2>(), PerChannel(gamma),
                                           PerChannel(beta), activations};
  if (residual)
    apply_formula<T>(op, Normalize<T, Activations, true>{norm}, launch, nullptr, &y, x, *residual);
  else
    apply_formula<T>(op, Normalize<T, Activations, false>{norm}, launch, nullptr, &y, x);
}

/// Computes the statistics of all groups, joins them over the ranks if `join` is not null, and normalizes.
template <class T, class Activations>
void forward(const View& y, const View& statistics, const View& x, const View* gamma, const View* beta,
             const View* residual, double eps, const Activations& activations, const JoinRanks* join,
             const Launch& launch) {
  constexpr const char* kOp = "group_norm";
  const Groups shape(x, statistics);
  std::optional<Workspace> memory;
  const Deviations<T, decltype(activations.before)> deviations{x, activations.before};
  const RangeSums sums = apply_formula<T>(kOp, deviations, launch, &memory, nullptr, x);
  const BlockLayout layout = layout_of_sums(shape.group_lines() * sums.ranges);
  launch_kernel(kOp, statistics_kernel<T, decltype(activations.before)>, grid_size(shape.count(), layout.columns),
                kBlock, 0, launch.stream, shape, layout, deviations, sums, statistics.as<double2>(), eps);
  if (join) (*join)();
  apply_norm<T>(kOp, y, x, statistics, gamma, beta, residual, activations, launch);
}

/// Updates running statistics; see track_statistics in ops/detail/kernels.def. The number of elements in a channel is
/// `count` plus the sum of `counts` over the ranks. Launch: one thread per channel in a 1-D grid-stride loop, kBlock
/// threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock)
    track_kernel(PerChannel running_mean, PerChannel running_var, const double2* statistics, int64_t channels,
                 double eps, double count, const double* counts, int64_t counts_stride, int64_t ranks,
                 double momentum) {
  wait_for_previous_kernels();
  for (int64_t rank = 0; rank < ranks; ++rank) count += counts[rank * counts_stride];
  if (count <= 1) return;  // the unbiased variance is undefined
  for (int64_t c = thread_index(); c < channels; c += thread_count()) {
    const auto move = [&](const PerChannel& running, double value) {
      const double own = running.at<T>(c, 0);
      running.set<T>(c, own + momentum * (value - own));
    };
    const double2 own = statistics[c];
    const double variance = 1 / (own.y * own.y) - eps;
    move(running_mean, own.x);
    move(running_var, (variance < 0 ? 0 : variance) * (count / (count - 1)));  // NaN stays NaN
  }
}

}  // namespace

namespace kernel {

void track_statistics(const View* running_mean, const View* running_var, const View& statistics, double eps,
                      double count, const View* counts, double momentum) {
  if (!running_mean && !running_var) return;
  const Launch launch(statistics);
  const PerChannel mean(running_mean), var(running_var);
  // One of the two vectors (running mean and variance) may be a half (bf16, f16) and the other f32. Dispatch on the
  // half, because PerChannel supports f32, the compute type, in addition to the half.
  dispatch_cuda(Floats(), item_size(mean.dtype) == 2 || !running_var ? mean.dtype : var.dtype, "track_statistics",
                [&]<class T>() {
                  launch_kernel("track_statistics", track_kernel<T>, grid_size(statistics.size[1]), kBlock, 0,
                                launch.stream, mean, var, statistics.as<const double2>(), statistics.size[1], eps,
                                counts ? 0.0 : count, counts ? counts->as<const double>() : nullptr,
                                counts ? counts->stride[0] : 0, counts ? counts->size[0] : 0, momentum);
                });
}

void group_norm(const View& y, const View& statistics, const View& x, const View* gamma, const View* beta,
                const View* residual, double eps, const NormActivations& activations, const JoinRanks* join) {
  if (x.size[1] == 0 || statistics.numel() == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, "group_norm", [&]<class T>() {
    with_vector_activations<T>(
        activations, [&](const auto& a) { forward<T>(y, statistics, x, gamma, beta, residual, eps, a, join, launch); },
        y, x, residual ? *residual : x);
  });
}

void normalize(const View& y, const View& x, const View& statistics, const View* gamma, const View* beta) {
  if (x.numel() == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, "normalize", [&]<class T>() {
    with_vector_activations<T>(
        {}, [&](const auto& none) { apply_norm<T>("normalize", y, x, statistics, gamma, beta, nullptr, none, launch); },
        y, x);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
