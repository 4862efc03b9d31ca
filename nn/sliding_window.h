// Predictions for whole volumes from a model that takes parts of them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "../core/tensor.h"

namespace voxgrad::nn {

struct SlidingWindowOptions {
  Triple window;         ///< D, H, W of what the model takes
  double overlap = 0.5;  ///< the least share of the window that neighbours share along each axis, in [0, 1)
  /// Weights of a window's voxels: exp(-r^2 / 2), with distances from its centre in units of `sigma` * window (nnU-Net:
  /// 1/8), and no less than what remains in nnU-Net, which keeps ten times them in f16. 0: all weights are 1.
  double sigma = 0.125;
  /// Also mirrored along these axes (0: D, 1: H, 2: W) and all combinations of them; predictions are averaged. The time
  /// doubles with each axis.
  Axes mirror_axes{};
  int64_t batch_size = 1;              ///< windows that the model takes at once
  std::optional<DType> precision{};    ///< runs the model under autocast
  std::optional<Device> device{};      ///< of the model; by default the volume's
  std::optional<Device> accumulate{};  ///< where the result is summed up and stays; by default the volume's
  /// Called after each batch with the windows done so far and their number; false ends it all.
  std::function<bool(int64_t done, int64_t total)> progress{};
};

/// Takes (B, C, window) to predictions (B, K, window) of a floating dtype, for any K. Call eval() of a module first.
using WindowModel = std::function<Tensor(const Tensor& windows)>;

/// The model's predictions for `volume` (N, C, D, H, W), averaged with weights where windows overlap: (N, K, D, H, W),
/// f32 (f64 if the predictions are). nnU-Net's scheme: windows stand as evenly as whole voxels let them, the first and
/// the last at the volume's ends; a volume smaller than the window lies in the middle of zeros (Isensee et al.,
/// "nnU-Net", Nature Methods 18, 2021).
///
/// Nothing is recorded by autograd. Windows are added one by one, in one order: the bits depend on batch_size no more
/// than the model's do. A volume on the CPU is copied to the model's device by windows, so that with `accumulate` there
/// too it may be larger than a GPU's memory; the CPU then adds a batch while the GPU computes the next.
///
/// The result is undefined if `progress` ended it. Throws Error for options that make no sense, for a volume that is
/// not floating, and for predictions of other sizes or dtypes.
Tensor sliding_window_inference(const Tensor& volume, const WindowModel& model, const SlidingWindowOptions& options);

}  // namespace voxgrad::nn
