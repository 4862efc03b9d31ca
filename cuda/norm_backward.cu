// The backward pass of group normalization. The first kernel computes sums over the positions of every (sample,
// channel). From these sums, the second kernel computes means over each group and the gradients of the parameters. The
// third kernel computes the gradient of the input from the means and, if requested, sums it over each channel.
#include <cmath>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/norm_gradients.cuh"

namespace voxgrad::cuda {
namespace {

/// A normalization (norm_shapes.cuh) computes v = before(x), u = (v - mean) * rstd * gamma + beta and y = after(u). Let
/// g be the gradient of u. Computes the sums of g and of g * (v - mean), where the mean is rounded to compute_t<T>. The
/// inputs are dy and x.
template <class T, class Activations>
struct GradientSums {
  static constexpr FormulaTraits kTraits{.inputs = 2,
                                         .sums = true,
                                         .heavy = !std::is_same_v<Activations, NoActivations>,
                                         .scalar = std::is_same_v<Activations, AnyActivations>};
  using Norm = Normalization<T, Activations>;
  using Channel = typename Norm::Channel;

  Norm norm;

  __device__ Channel channel(int64_t n, int64_t c, int64_t) const { return norm.channel(n, c); }
  __device__ void operator()(const Channel& channel, Run<T>& run, const compute_t<T> (&x)[2]) const {
    using Sum = typename Run<T>::Sum;
    const compute_t<T> centered = norm.centered(channel, x[1]),
                       g = norm.activations.after.gradient(x[0], norm.normalized(channel, centered));
    run.x += static_cast<Sum>(g);
    run.y += static_cast<Sum>(g) * static_cast<Sum>(centered);
  }
};

/// Computes dx from dy and x. The gradient of v is rstd * (h - mean(h) - xhat * mean(h * xhat)). Because v = before(x),
/// dx is this gradient times the derivative of the activation `before` at x. With `sums`, also sums the rounded dx over
/// each channel. The sums are the gradient of a bias per channel that x includes.
template <class T, class Activations, bool sums>
struct InputGradient {
  static constexpr FormulaTraits kTraits{
      .inputs = 2, .writes = true, .sums = sums, .scalar = std::is_same_v<Activations, AnyActivations>};
  using Norm = Normalization<T, Activations>;
  using Wide = compute_t<T>;

  Norm norm;
  const double2* group_means;

  /// Constants of the gradient of v, which is g * norm.factor + (v - norm.mean) * slope + offset.
  struct Channel {
    typename Norm::Channel norm;
    Wide slope;
    Wide offset;
  };
  __device__ Channel channel(int64_t n, int64_t c, int64_t) const {
    const double2 group = norm.statistics[norm.shape.number(n, c)], means = group_means[norm.shape.number(n, c)];
    const double slope = -group.y * group.y * means.y;
    return {norm.channel(n, c), static_cast<Wide>(slope),
            static_cast<Wide>(-group.y * means.x - rest_of<T>(group.x) * slope)};
  }
  __device__ T operator()(const Channel& channel, Run<T>& run, const Wide (&x)[2]) const {
    const Wide centered = norm.centered(channel.norm, x[1]),
               g = norm.activations.after.gradient(x[0], norm.normalized(channel.norm, centered));
    const Wide dv = g * channel.norm.factor + (centered * channel.slope + channel.offset);
    const T dx = convert<T>(norm.activations.before.gradient(dv, x[1]));
    if constexpr (sums) run.x += convert<typename Run<T>::Sum>(dx);
    return dx;
  }
};

/// Computes all gradients for which `out` has a view.
template <class T, class Activations>
void backward(const GroupNormGradients& out, bool sums_are_zero, const View& means, const View& dy, const View& x,
              const View& statistics, const View* gamma, const View* beta, const Activations& activations,
              const JoinRanks* join, const Launch& launch) {
  constexpr const char* kOp = "group_norm_backward";
  const Groups shape(x, statistics);
  std::optional<Workspace> memory;
  const Normalization<T, Activations> norm{shape, statistics.as<const double2>(), PerChannel(gamma), PerChannel(beta),
                                           activations};
  const RangeSums sums = apply_formula<T>(kOp, GradientSums<T, Activations>{norm}, launch, &memory, nullptr, dy, x);
  sum_gradients<T>(kOp, shape, sums, norm.statistics, norm.gamma,
                   {means.as<double2>(), PerChannel(out.dgamma), PerChannel(out.dbeta),
                    PerChannel(sums_are_zero ? out.sums : nullptr)},
                   launch);
  if (join) (*join)();
  const auto* const joined = means.as<const double2>();
  if (!out.sums || sums_are_zero) {
    apply_formula<T>(kOp, InputGradient<T, Activations, false>{norm, joined}, launch, nullptr, &out.dx, dy, x);
    return;
  }
  const RangeSums of_dx =
      apply_formula<T>(kOp, InputGradient<T, Activations, true>{norm, joined}, launch, &memory, &out.dx, dy, x);
  sum_gradients<T>(kOp, shape, of_dx, nullptr, norm.gamma, {.dbeta = PerChannel(out.sums)}, launch);
}

}  // namespace

namespace kernel {

void group_norm_backward(const GroupNormGradients& out, const View& means, const View& dy, const View& x,
                         const View& statistics, const View* gamma, const View* beta,
                         const NormActivations& activations, const JoinRanks* join) {
  if (x.size[1] == 0) return;
  const Launch launch(x);
  const bool zero = out.sums_are_zero(statistics.size[1], activations);
  dispatch_cuda(Floats(), x.dtype, "group_norm_backward", [&]<class T>() {
    with_vector_activations<T>(
        activations,
        [&](const auto& a) { backward<T>(out, zero, means, dy, x, statistics, gamma, beta, a, join, launch); }, out.dx,
        dy, x);
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
