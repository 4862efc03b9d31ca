// The device contract: the table of kernels through which operators compute on a device, and the types of the kernels'
// parameters. ops/detail/kernels.def lists and documents the kernels.
//
// A kernel is a plain function on Views. Rules for all kernels:
// - All views of a call are on one device. The operator has checked the shapes; a kernel checks only dtypes, and throws
//   "<op> has no <device> kernel for <dtype>" (dispatch() in core/dtype.h) for a dtype that it does not support.
// - Inputs may have any strides, including zero and negative ones. Outputs have no zero strides and do not overlap
//   inputs, except that an output of unary, binary and gelu_backward may be the same view as an input. Sizes may be
//   zero: an output without elements is not written, and an empty sum is 0.
// - Outputs arrive uninitialized; the kernel writes every element.
// - CUDA kernels are queued on the current stream of the views' device. No kernel waits for the device.
// - Inputs with the same values, strides and alignment give the same bits, for any number of threads.
// - Unless noted, kernels support f32, f64, bf16 and f16. Kernels compute bf16 and f16 in float32 or double and round
//   once.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "../../core/device.h"
#include "../../core/profiler.h"
#include "../../core/random.h"
#include "../../core/reduce_op.h"
#include "../../core/view.h"
#include "../activation.h"
#include "../optim.h"
#include "operators.h"

namespace voxgrad {

struct GridSampleOptions;

/// Returns the name of the operator that reduces with `op`: sum, amax, amin or mean.
constexpr const char* name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "amax", "amin", "mean"};
  return kNames[static_cast<size_t>(op)];
}

/// Geometry of a convolution. 1-D and 2-D convolutions have leading axes of size 1.
struct ConvGeometry {
  Triple stride{1};
  Triple padding{0};
  Triple dilation{1};
  int64_t groups = 1;
  friend bool operator==(const ConvGeometry&, const ConvGeometry&) = default;
};

/// The three kernels of a convolution: forward, gradient of the input (also the transposed convolution), and gradient
/// of the weight.
enum class ConvPass : uint8_t { fprop, dgrad, wgrad };

/// The kernel that a device would run for a convolution.
struct ConvExplanation {
  std::string plan;      ///< kernel, arithmetic, tiles, workspace
  double flop_rate = 0;  ///< highest rate of the device, in FLOP per second; 0 if unknown
  double byte_rate = 0;  ///< highest memory bandwidth of the device, in bytes per second; 0 if unknown
};

/// Operations that a convolution applies to its sums before it stores them.
struct ConvEpilogue {
  const View* bias;  ///< one element per channel of the output, or null
  bool relu;         ///< applied after the bias

  ConvEpilogue(const View* channel_bias = nullptr, bool with_relu = false) : bias(channel_bias), relu(with_relu) {}
};

/// Outputs of group_norm_backward. All but dx may be null.
struct GroupNormGradients {
  View dx;
  const View* dgamma = nullptr;
  const View* dbeta = nullptr;
  const View* sums = nullptr;  ///< (C), dx summed over samples and positions: the gradient of a bias that x includes

  /// Returns whether `sums` are 0. A norm with one group per channel subtracts the mean of the channel, so that a bias
  /// has no effect unless an activation precedes the norm.
  bool sums_are_zero(int64_t groups, const NormActivations& activations) const {
    return sums && groups == dx.size[1] && activations.before.kind == ActivationKind::none;
  }
};

/// Joins the results of a normalization whose groups span several ranks (kernels.def).
using JoinRanks = std::function<void()>;

/// Options of class_sums.
struct ClassSums {
  int64_t ignore_index;  ///< voxels with this class index are skipped
  bool softmax;          ///< true: p = softmax(x) over the classes; false: p = x
  bool squared;          ///< the first sum adds p * p instead of p
};
/// Number of sums per class.
inline constexpr int kClassSums = 5;
/// Largest number of classes that the class_sums kernels support.
inline constexpr int kMaxClasses = 12;

struct PoolGeometry {
  Triple kernel_size{1};
  Triple stride{1};
  Triple padding{0};
  Triple dilation{1};
};

/// A linear map along one axis with n inputs. The mode determines the value of output o:
///   nearest        the input at min(floor(s), n - 1), where s = o * scale
///   nearest_exact  the input at min(floor(s), n - 1), where s = (o + 0.5) * scale
///   linear         the interpolation of the two inputs around s, where s = o * scale if align_corners, otherwise
///                  s = max((o + 0.5) * scale - 0.5, 0)
///   cubic          the interpolation of the four inputs around s, where s = o * scale if align_corners, otherwise
///                  s = (o + 0.5) * scale - 0.5; positions outside of the axis read the nearest input
///   box            the sum of the inputs in the window o * stride - padding + [0, kernel), multiplied by `weight`. If
///                  `weight` is 0, the sum is instead divided by the number of positions of the window that are inside
///                  the padded input (count_include_pad) or inside the input (otherwise)
///   adaptive       the mean of the inputs from floor(o * n / outputs) to ceil((o + 1) * n / outputs) - 1
///   reflect, replicate, circular  the input at o - padding; positions outside of the axis are padded as in PyTorch
/// The CPU and CUDA kernels compute the positions and weights with the functions in ops/detail/resample_taps.h.
struct Resample {
  enum class Mode : uint8_t { nearest, nearest_exact, linear, cubic, box, adaptive, reflect, replicate, circular };
  Mode mode = Mode::nearest;
  bool align_corners = false;
  bool count_include_pad = true;
  double scale = 1;  ///< input positions per output position
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;  ///< positions before the first input; in mode box, also after the last input
  int64_t outputs = 1;
  double weight = 0;  ///< factor of the sums in mode box; 0 to divide the sums as described above
};

/// The maps along D, H and W. A default Resample leaves its axis unchanged.
using ResampleMaps = std::array<Resample, 3>;

/// A parameter, its gradient and its optimizer state. The dtype of the state is compute_t of the dtype of the
/// parameter. All views are dense and have the same shape and strides.
struct StepViews {
  View param;
  View grad;
  View state[3];  ///< the states that the step uses, in order; unused entries are at the end
};

/// StepScaling (ops/optim.h) as pointers to memory on the device of the parameters. Each pointer may be null.
struct StepGate {
  const float* scale = nullptr;        ///< the step divides the gradients by this value; null: by 1
  const int64_t* found_inf = nullptr;  ///< the step changes nothing if this value is not 0
  const int64_t* skipped = nullptr;    ///< number of skipped steps, which is subtracted from the number of this step
};

/// The kernels of a device: a function pointer for each row of kernels.def.
struct Kernels {
#define VG_KERNEL(name, outputs, parameters) void(*name) parameters;
#include "kernels.def"
  /// Describes the kernel that the device of `w` would run for `pass`. Does not read the data of the views. For CUDA,
  /// neither a GPU nor a build with CUDA is required.
  ConvExplanation (*explain_conv)(ConvPass pass, const View& x, const View& w, const View& y,
                                  const ConvGeometry& geometry);
};

/// Returns the kernels for the instructions that cpu_capability() names.
const Kernels& cpu_kernels();
/// Returns the CPU kernels for `capability`; if it is null, for the best capability of this processor. Throws Error if
/// the program has no such kernels, or if the processor does not support them.
const Kernels& cpu_kernels_for(const char* capability);
/// Returns the CUDA kernels. In a build without CUDA, all kernels throw "this build has no CUDA".
const Kernels& cuda_kernels();
/// Returns a table whose entries run the kernels of the device and record each call in the profiler.
const Kernels& profiled_kernels(Device device);
/// Returns the kernels of the device, or profiled_kernels() while the profiler is active.
inline const Kernels& kernels(Device device) {
  if (profiler::active()) [[unlikely]]
    return profiled_kernels(device);
  return device.is_cuda() ? cuda_kernels() : cpu_kernels();
}

/// Calls explain_conv of the device of `w`.
inline ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y,
                                    const ConvGeometry& geometry) {
  return (w.device < 0 ? cpu_kernels() : cuda_kernels()).explain_conv(pass, x, w, y, geometry);
}

}  // namespace voxgrad
