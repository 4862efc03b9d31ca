// The backward pass of group normalization. The first kernel computes sums over the positions of every (sample,
// channel). The gradients of the parameters and the means over the groups are computed from these sums. The last kernel
// computes the gradient of the input.
#include <cmath>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/norm_sums.cuh"

namespace voxgrad::cuda {
namespace {

/// The normalization of the forward pass: v = before(x), u = (v - mean) * rstd * gamma + beta, and y = after(u). The
/// gradient of u is called g.
template <class T, class Activations>
struct Normalization {
  using Wide = compute_t<T>;

  Groups shape;
  Matrix mean, rstd;
  PerChannel gamma, beta;
  Activations activations;

  struct Channel {
    Wide center;
    Wide factor;
    Wide term;
  };
  __device__ Channel channel(int64_t n, int64_t c) const {
    const int64_t group = shape.group(c);
    const auto scale = static_cast<double>(rstd.at<Wide>(n, group));
    return {mean.at<Wide>(n, group), static_cast<Wide>(scale * gamma.at<T>(c, 1)), static_cast<Wide>(beta.at<T>(c, 0))};
  }
  /// Returns v - mean.
  __device__ Wide centered(const Channel& channel, Wide x) const {
    return activations.before.value(x) - channel.center;
  }
  /// Returns g.
  __device__ Wide gradient(const Channel& channel, Wide dy, Wide centered) const {
    return activations.after.gradient(dy, centered * channel.factor + channel.term);
  }
};

/// Computes the sums of g and g * (v - mean). The inputs are dy and x.
template <class T, class Activations>
struct GradientSums {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = false, kSums = true, kHeavy = !std::is_same_v<Activations, NoActivations>,
                        kScalar = std::is_same_v<Activations, AnyActivations>;
  using Norm = Normalization<T, Activations>;
  using Channel = typename Norm::Channel;

  Norm norm;

  __device__ Channel channel(int64_t n, int64_t c, int64_t) const { return norm.channel(n, c); }
  __device__ void operator()(const Channel& channel, Run<T>& run, const compute_t<T> (&x)[2]) const {
    using Sum = typename Run<T>::Sum;
    const compute_t<T> centered = norm.centered(channel, x[1]), g = norm.gradient(channel, x[0], centered);
    run.x += static_cast<Sum>(g);
    run.y += static_cast<Sum>(g) * static_cast<Sum>(centered);
  }
};

/// Computes group_means[sample, group] = the means over the group of (h, h * xhat), with xhat = (v - mean) * rstd and
/// h = gamma * g, from the sums of GradientSums. The entry after the last group receives the number of elements in a
/// group. Launch: one CTA per layout.columns groups in a 1-D grid of any size, kBlock threads per CTA. Static shared
/// memory: kBlock sums.
template <class T>
__global__ void __launch_bounds__(kBlock)
    group_means_kernel(const __grid_constant__ Groups shape, const BlockLayout layout, const double2* total,
                       Matrix rstd, PerChannel gamma, double2* group_means) {
  __shared__ double2 shared[kBlock];
  if (thread_index() == 0) group_means[shape.count()] = {static_cast<double>(shape.group_lines() * shape.length), 0};
  for (int64_t tile = blockIdx.x; tile * layout.columns < shape.count(); tile += gridDim.x) {
    const int64_t number = tile * layout.columns + layout.column();
    const bool inside = number < shape.count();
    double2 sum{0, 0};
    if (inside)
      for (int64_t i = layout.reducer(); i < shape.group_lines(); i += layout.reducers) {
        const int64_t line = shape.line(number, i);
        const double2 sums = total[line];
        const double weight = gamma.at<T>(line - quotient(line, shape.channels) * shape.channels, 1);
        sum = add(sum, {weight * sums.x, weight * sums.y});
      }
    sum = combine_reducers(sum, layout, shared, add);
    if (!inside || layout.reducer() > 0) continue;
    const int64_t n = quotient(number, shape.groups), group = number - n * shape.groups;
    const double count = fmax(static_cast<double>(shape.group_lines() * shape.length), 1.0);
    group_means[number] = {sum.x / count, sum.y * static_cast<double>(rstd.at<compute_t<T>>(n, group)) / count};
  }
}

/// Computes mean[group] = the mean of all[rank][group], weighted by the number of elements of each rank; `all` is
/// (ranks, groups + 1). Launch: one thread per group in a 1-D grid of any size, kBlock threads per CTA. No shared
/// memory.
__global__ void __launch_bounds__(kBlock)
    average_ranks_kernel(int64_t groups, const double2* all, int64_t ranks, double2* mean) {
  const RankShares shares(all, ranks, groups);
  for (int64_t group = thread_index(); group < groups; group += thread_count()) {
    double2 sum{0, 0};
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const double2 own = all[rank * (groups + 1) + group];
      sum = add(sum, {shares[rank] * own.x, shares[rank] * own.y});
    }
    mean[group] = sum;
  }
}

/// Computes dx from dy and x. The gradient of v is rstd * (h - mean(h) - xhat * mean(h * xhat)); dx follows from it by
/// the gradient of before().
template <class T, class Activations>
struct InputGradient {
  static constexpr int kInputs = 2;
  static constexpr bool kWrites = true, kSums = false, kScalar = std::is_same_v<Activations, AnyActivations>;
  using Norm = Normalization<T, Activations>;
  using Wide = compute_t<T>;

  Norm norm;
  const double2* group_means;

  struct Channel {
    typename Norm::Channel norm;
    Wide slope;
    Wide offset;
  };
  __device__ Channel channel(int64_t n, int64_t c, int64_t) const {
    const int64_t group = norm.shape.group(c);
    const auto scale = static_cast<double>(norm.rstd.template at<Wide>(n, group));
    const double2 means = group_means[norm.shape.number(n, c)];
    return {norm.channel(n, c), static_cast<Wide>(-scale * scale * means.y), static_cast<Wide>(-scale * means.x)};
  }
  __device__ T operator()(const Channel& channel, Run<T>&, const Wide (&x)[2]) const {
    const Wide centered = norm.centered(channel.norm, x[1]), g = norm.gradient(channel.norm, x[0], centered);
    const Wide dv = g * channel.norm.factor + (centered * channel.slope + channel.offset);
    return convert<T>(norm.activations.before.gradient(dv, x[1]));
  }
};

/// Computes all gradients for which `out` has a view.
template <class T, class Activations>
void backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean, const View& rstd,
              const View* gamma, const View* beta, const Activations& activations, const GatherStatistics* over_ranks,
              const Launch& launch) {
  constexpr const char* kOp = "group_norm_backward";
  const Groups shape(x, mean);
  const Workspace total(launch, static_cast<size_t>(shape.lines()) * sizeof(double2));
  const Workspace group_means(launch, static_cast<size_t>(shape.count() + 1) * sizeof(double2));
  const Normalization<T, Activations> norm{shape,      Matrix(mean), Matrix(rstd), PerChannel(gamma), PerChannel(beta),
                                           activations};
  apply_formula<T>(kOp, GradientSums<T, Activations>{norm}, launch, total.as<double2>(), nullptr, dy, x);
  const BlockLayout layout = BlockLayout::choose(shape.group_lines(), false);
  group_means_kernel<T><<<grid_size(shape.count(), layout.columns), kBlock, 0, launch.stream>>>(
      shape, layout, total.as<double2>(), Matrix(rstd), PerChannel(gamma), group_means.as<double2>());
  check_launch(kOp);
  if (over_ranks) {
    const View all = (*over_ranks)(double_matrix(x, group_means.as<double2>(), shape.count() + 1, 2));
    average_ranks_kernel<<<grid_size(shape.count()), kBlock, 0, launch.stream>>>(
        shape.count(), all.as<const double2>(), all.size[0], group_means.as<double2>());
    check_launch(kOp);
  }
  parameter_gradients<T>(kOp, shape, total.as<double2>(), Matrix(rstd), out.dgamma, out.dbeta, launch);
  const InputGradient<T, Activations> formula{norm, group_means.as<double2>()};
  if (out.sums)
    apply_with_sums<T>(kOp, shape, formula, launch, out.dx, *out.sums, dy, x);
  else
    apply_formula<T>(kOp, formula, launch, nullptr, &out.dx, dy, x);
}

}  // namespace

namespace kernel {

void group_norm_backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                         const View& rstd, const View* gamma, const View* beta, const NormActivations& activations,
                         const GatherStatistics* over_ranks) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, "group_norm_backward", [&]<class T>() {
    with_vector_activations<T>(
        activations, [&](const auto& a) { backward<T>(out, dy, x, mean, rstd, gamma, beta, a, over_ranks, launch); },
        out.dx, dy, x);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
