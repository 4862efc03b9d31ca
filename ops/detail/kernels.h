// The device contract: everything that the operators ask of a device, in one table.
//
// A kernel is a plain function on Views. What holds for all of them:
// - All views of a call lie on one device. Shapes were checked by the operator; a kernel checks only dtypes,
//   and throws "<op> has no <device> kernel for <dtype>" (dispatch() in core/dtype.h) for one it lacks.
// - Any strides are allowed, for inputs also zero and negative ones; outputs have no zero strides and never
//   overlap inputs, except that unary and binary may be given one input's own view as output. Sizes may be
//   zero: then outputs without elements are left, and empty sums are 0.
// - Outputs arrive uninitialised; every element is written.
// - On CUDA the work is queued on the current stream of the views' device. Nothing waits.
// - The same inputs give the same bits, whatever the number of threads.
// - Unless noted: f32, f64, bf16 and f16; halves are computed in float32 or double and rounded once.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "../../core/device.h"
#include "../../core/profiler.h"
#include "../../core/random.h"
#include "../../core/view.h"
#include "../activation.h"
#include "../optim.h"
#include "operators.h"

namespace voxgrad {

struct GridSampleOptions;

enum class ReduceOp : uint8_t { sum, mean, amax, amin };

/// Geometry of the convolution family; one-axis and two-axis forms arrive with leading axes of size 1.
struct ConvGeometry {
  Triple stride{1};
  Triple padding{0};
  Triple dilation{1};
  int64_t groups = 1;
  friend bool operator==(const ConvGeometry&, const ConvGeometry&) = default;
};

/// Forward, gradient by the input (which is the transposed convolution), gradient by the weight.
enum class ConvPass : uint8_t { fprop, dgrad, wgrad };

/// What a device would do with a convolution.
struct ConvExplanation {
  std::string plan;                     // kernel, arithmetic, tiles, workspace
  double flop_rate = 0, byte_rate = 0;  // what the device can do at best, a second; 0: not known
};

/// What a convolution does to its sums before it writes them.
struct ConvEpilogue {
  const View* bias;  ///< over the result's channels, or null
  bool relu;         ///< after the bias

  ConvEpilogue(const View* channel_bias = nullptr, bool with_relu = false) : bias(channel_bias), relu(with_relu) {}
};

/// Of a normalisation: all but dx may be null. sums (C) is dx summed over samples and positions: the gradient of a bias
/// that was added to make x.
struct GroupNormGradients {
  View dx;
  const View *dgamma = nullptr, *dbeta = nullptr, *sums = nullptr;
};

/// Gathers the statistics of a normalization whose groups lie on several ranks. A normalization kernel calls it after
/// the reduction over this rank's elements with an f64 (groups + 1, k): a row of statistics for each group, then a row
/// that begins with the number of elements that this rank has in a group, by which kernels weight the rank. Returns the
/// rows of all ranks, a contiguous (ranks, groups + 1, k) that lives until the kernel returns. Queues its work as
/// kernels do.
using OverRanks = std::function<View(const View& of_groups)>;

/// What class_sums takes for the probability p of a class, and which voxels it passes over.
struct ClassSums {
  int64_t ignore_index;
  bool softmax;  ///< p = softmax(x) over the classes, else x
  bool squared;  ///< the first sum is of p * p
};
/// The number of sums of a class, and how many classes kernels take.
inline constexpr int kClassSums = 5, kMaxClasses = 12;

struct PoolGeometry {
  Triple kernel_size{1};
  Triple stride{1};
  Triple padding{0};  // in front; behind, the result's size tells it
  Triple dilation{1};
};

/// A linear map along one axis, from n inputs. Output o reads
///   nearest, nearest_exact: the input at min(floor(s), n - 1), with s = o * scale, (o + 0.5) * scale;
///   linear:   the two inputs about s = align_corners ? o * scale : max((o + 0.5) * scale - 0.5, 0);
///   cubic:    the four about s = align_corners ? o * scale : (o + 0.5) * scale - 0.5, those outside being the
///   border's; box:      the inputs o * stride - padding + [0, kernel), those inside summed and divided by kernel, or
///   by the
///             number inside the padded input, or (count_include_pad = false) by the number inside, or times weight;
///   adaptive: the mean of the inputs floor(o * n / outputs) up to ceil((o + 1) * n / outputs);
///   reflect, replicate, circular: input o - padding; outside, one inside in the way that the name says.
/// The terms are worked out by the functions in ops/detail/resample_taps.h, which both devices use.
struct Resample {
  enum class Mode : uint8_t { nearest, nearest_exact, linear, cubic, box, adaptive, reflect, replicate, circular };
  Mode mode = Mode::nearest;
  bool align_corners = false;
  bool count_include_pad = true;
  double scale = 1;  // input positions to an output step
  int64_t kernel = 1, stride = 1, padding = 0, padding_end = 0, outputs = 1;
  double weight = 0;  // 0: none is given
};

/// Along D, H and W. A default Resample leaves its axis as it is.
using ResampleMaps = std::array<Resample, 3>;

/// A parameter, its gradient and its optimizer's state, of compute_t of its type: dense, of one shape and strides.
struct StepViews {
  View param, grad;
  View state[3];  // those that the step's options use, one after the other
};

/// StepScaling of ops/optim.h, on the device.
struct StepGate {
  const float* scale = nullptr;
  const int64_t* found_inf = nullptr;
  const int64_t* skipped = nullptr;
};

struct Kernels {
  // ---- elementwise
  /// out = in converted to out's dtype, by convert() of core/dtype.h; any pair of dtypes.
  void (*copy)(const View& out, const View& in);
  /// Any dtype.
  void (*fill)(const View& out, double value);
  /// out[i] = start + i * step over a contiguous 1-D output; also i64, i32.
  void (*arange)(const View& out, double start, double step);
  void (*unary)(UnaryOp op, const View& out, const View& in, double a, double b);
  /// `a` and `b`, here and in unary: the constants of the operator's row in ops/detail/operators.h.
  void (*binary)(BinaryOp op, const View& out, const View& x, const View& y, double a, double b);
  /// out = condition ? x : y, condition bool; any dtype.
  void (*where)(const View& out, const View& condition, const View& x, const View& y);
  /// Element i in row-major order is philox_uniform / philox_normal (core/detail/philox.h) of the state; out is
  /// contiguous.
  void (*uniform)(const View& out, GeneratorState state);
  void (*normal)(const View& out, GeneratorState state);

  // ---- reductions
  /// `out` has `in`'s rank; its axes of size 1 where in's are larger are reduced. sum: also i64, i32 (into an i64
  /// out), u8 and bool (into an i64 out), wrapping around; amax and amin: also i64, i32, and NaN wins.
  /// Floating sums are formed in double, and divided by their number before they are rounded: mean.
  void (*reduce)(ReduceOp op, const View& out, const View& in);
  /// y = softmax(x) or log_softmax(x) along `axis`; y has x's shape.
  void (*softmax)(const View& y, const View& x, int axis, bool logarithm);
  /// Element k of out along `axis` = the sum of in's up to k, or, reverse, from k on; also of integers and bool, which
  /// wrap around, into an i64 out. Floats are summed in double.
  void (*cumsum)(const View& out, const View& in, int axis, bool reverse);

  // ---- selection, of any dtype: positions along `axis`, i64, in views that differ from in's shape there only
  /// index, of size 1 along `axis` (in is not empty there): where the first largest, or smallest, element is; NaN wins.
  void (*argmax)(const View& index, const View& in, int axis, bool largest);
  /// Where the elements are that come first in ascending, or descending, order: as many as index has room for. Stable;
  /// NaN counts as the largest.
  void (*sort)(const View& index, const View& in, int axis, bool descending);

  // ---- linear algebra
  /// c[b] = a[b] * b[b]: a (batch, m, k), b (batch, k, n), c (batch, m, n); batch strides may be 0.
  /// c's last axis is contiguous; a and b may be transposed or have any strides.
  void (*matmul)(const View& c, const View& a, const View& b);

  // ---- convolution: x (N, Ci, D, H, W), w (Co, Ci / groups, kD, kH, kW), y (N, Co, D', H', W').
  // Output position o and tap k meet input position o * stride - padding + k * dilation.
  void (*conv_forward)(const View& y, const View& x, const View& w, const ConvEpilogue& epilogue,
                       const ConvGeometry& geometry);
  /// x from y: the gradient of conv_forward in its input, and conv_transpose forward (bias over x's channels).
  void (*conv_backward_data)(const View& x, const View& y, const View& w, const ConvEpilogue& epilogue,
                             const ConvGeometry& geometry);
  void (*conv_backward_weight)(const View& w, const View& x, const View& y, const ConvGeometry& geometry);
  /// What one of them would run; the views' data is not looked at. On CUDA also without a GPU.
  ConvExplanation (*explain_conv)(ConvPass pass, const View& x, const View& w, const View& y,
                                  const ConvGeometry& geometry);

  // ---- losses: x (N, C, L), C <= kMaxClasses; target (N, L), the numbers of classes in i64, i32 or u8. Numbers
  // outside [0, C) other than ignore_index are on the CPU the operator's to find; on CUDA they are an error of `op`, as
  // in indexing, and their voxels are passed over.
  /// sums (N, C, 5), or (1, C, 5): over the samples too; f64, contiguous. With t = 1 in voxels of class c, else 0, over
  /// the voxels of p, t * p, t, -t * log(p) and -log(p); the last two mean something with softmax only.
  void (*class_sums)(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options);
  /// dx from `grad`, of the shape of the sums, contiguous and of compute_t.
  void (*class_sums_backward)(const View& dx, const View& grad, const View& x, const View& target,
                              const ClassSums& options);

  // ---- normalisation: x (N, C, L) contiguous or with channels innermost, any floating dtype; mean and rstd (N,
  // groups) of compute_t of it, or (1, groups): over the samples too; gamma, beta and gradients over the channels (C)
  // of either of the two, or null
  /// y = after((before(x) - mean) * rstd * gamma + beta). over_ranks, or null: of (mean, rstd).
  void (*group_norm)(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma,
                     const View* beta, double eps, const NormActivations& activations, const OverRanks* over_ranks);
  /// The same, without activations, with mean and rstd that are given.
  void (*normalize)(const View& y, const View& x, const View& mean, const View& rstd, const View* gamma,
                    const View* beta);
  /// over_ranks, or null: of means over the groups. dgamma, dbeta and sums are this rank's.
  void (*group_norm_backward)(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                              const View& rstd, const View* gamma, const View* beta, const NormActivations& activations,
                              const OverRanks* over_ranks);
  /// running += momentum * (value - running), where running_mean (C) takes mean (1, C), and running_var (C) the
  /// variance rstd^-2 - eps times n / (n - 1). Either may be null. n is `count` or, unless counts is null, the sum of
  /// counts (ranks), f64, the elements that each rank has in a channel; if that sum is 0, nothing changes.
  void (*track_statistics)(const View* running_mean, const View* running_var, const View& mean, const View& rstd,
                           double eps, double count, const View* counts, double momentum);
  /// y = x where x > 0, else weight (C) * x; views (N, C, L) as above.
  void (*prelu)(const View& y, const View& x, const View& weight);
  /// dx = dy where x > 0, else weight * dy; dweight (C) = sums of dy * x over samples and positions where it is not.
  void (*prelu_backward)(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight);
  /// dz = relu_grad(dy, y), dbias (C) = its sums over samples and positions: views (N, C, L) as above.
  void (*relu_bias_backward)(const View& dz, const View& dbias, const View& dy, const View& y);

  // ---- pooling and resampling
  /// y (N, C, D', H', W'), indices of y's shape, i64 or i32, or null: position in D * H * W of the first maximum; NaN
  /// wins.
  void (*max_pool)(const View& y, const View* indices, const View& x, const PoolGeometry& geometry);
  void (*max_pool_backward)(const View& dx, const View& dy, const View& indices, const PoolGeometry& geometry);
  /// out (N, C, D', H', W') = the maps applied to in (N, C, D, H, W). transposed: the transposed maps, whose outputs
  /// are in. An axis holds fewer than 2^31 elements.
  void (*resample)(const View& out, const View& in, const ResampleMaps& maps, bool transposed);
  /// y (N, C, D', H', W') = x (N, C, D, H, W) at the positions grid (N, D', H', W', 3) of compute_t of x's dtype.
  void (*grid_sample)(const View& y, const View& x, const View& grid, const GridSampleOptions& how);
  /// dx and dgrid, which is contiguous, may be null.
  void (*grid_sample_backward)(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                               const GridSampleOptions& how);

  // ---- indexing
  // An index out of range is an error of `op`, a string literal: on the CPU at once, on CUDA at the next wait for the
  // device; until then it yields NaN or 0, or adds nothing.
  /// out[.., i, ..] = in[.., index[.., i, ..], ..] along `axis`; index i64 of out's shape. Any dtype.
  void (*gather)(const char* op, const View& out, const View& in, const View& index, int axis);
  /// out is zero, then out[.., index[.., i, ..], ..] += in[.., i, ..] in the order of i.
  void (*scatter_add)(const char* op, const View& out, const View& in, const View& index, int axis);

  /// A step of an optimizer `op` (ops/optim.h), in place on a list of one dtype and device. State: sgd (momentum), adam
  /// (exp_avg, exp_avg_sq, max_exp_avg_sq), rmsprop (square_avg, momentum, grad_avg), adagrad (sum), lion (exp_avg),
  /// ema (average); what the options do not use is not looked at.
  void (*step)(const char* op, std::span<const StepViews> params, const AnyStep& step, const StepGate& gate);
  /// out, one f64: the sum of the squares of all elements of a list of one floating dtype, each dense.
  void (*sum_of_squares)(const View& out, std::span<const View> list);
};

const Kernels& cpu_kernels();
/// All entries throw "this build has no CUDA" in a build without it.
const Kernels& cuda_kernels();
/// The same, recorded by the profiler.
const Kernels& profiled_kernels(Device device);
inline const Kernels& kernels(Device device) {
  if (profiler::active()) [[unlikely]]
    return profiled_kernels(device);
  return device.is_cuda() ? cuda_kernels() : cpu_kernels();
}

}  // namespace voxgrad
