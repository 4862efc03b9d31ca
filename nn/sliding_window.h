// Sliding-window inference: predictions for volumes that are larger than the input of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "../core/tensor.h"

namespace voxgrad::nn {

/// Options of sliding_window_inference.
struct SlidingWindowOptions {
  Triple window;         ///< D, H, W of the model's input, in voxels
  double overlap = 0.5;  ///< minimum overlap of neighboring windows, as a fraction of their size, in [0, 1)
  /// Standard deviation of the Gaussian that weights the voxels of a window, as a fraction of the window's size.
  /// nnU-Net uses 1/8. 0 selects equal weights. As in nnU-Net, the largest weight is 10, and weights that f16 would
  /// round to 0 get the smallest weight that is positive in f16.
  double sigma = 0.125;
  /// Axes of test-time mirroring (0: D, 1: H, 2: W). The result is the mean over all combinations of mirrored axes. The
  /// time doubles with each axis.
  Axes mirror_axes{};
  int64_t batch_size = 1;              ///< windows per call of the model
  std::optional<DType> precision{};    ///< runs the model under autocast to this dtype
  std::optional<Device> device{};      ///< device of the model; by default the volume's
  std::optional<Device> accumulate{};  ///< device of the sums and of the result; by default the volume's
  /// dtype of the sums and of the result: f32 or f16. f16 reproduces the results of nnU-Net, which are less accurate:
  /// the weights, the sums after each window and the final quotients are rounded to f16.
  DType sum_dtype = f32;
  /// Called after each batch with the number of finished windows and the number of all windows. The function returns
  /// false to cancel.
  std::function<bool(int64_t done, int64_t total)> progress{};
};

/// The model: a function that maps a batch of B windows (B, C, D, H, W) to predictions (B, K, D, H, W) of a
/// floating-point dtype. D, H, W is the size of a window, and K may be any number. If the model is a module, call
/// eval() of the module first.
using WindowModel = std::function<Tensor(const Tensor& windows)>;

/// Returns the model's predictions for `volume` (N, C, D, H, W): (N, K, D, H, W) of dtype sum_dtype, or f64 if
/// the predictions are f64 and sum_dtype is f32. Overlapping predictions are averaged with the weights that `sigma`
/// defines. As in nnU-Net, windows are placed at equal distances, rounded to whole voxels, from one end of each axis to
/// the other. A volume smaller than the window is padded with zeros on both sides (Isensee et al., "nnU-Net", Nature
/// Methods 18, 2021).
///
/// Autograd does not record the predictions. Windows are added one at a time in a fixed order, so batch_size affects
/// the result only if it affects the model's predictions. A volume on the CPU is copied to the model's device one batch
/// at a time. With `accumulate` on the CPU, the volume may therefore be larger than the GPU's memory, and the CPU adds
/// a batch while the GPU computes the next one.
///
/// Returns an undefined tensor if `progress` cancels. Throws Error for invalid options, for a volume that is empty or
/// not floating-point, and for predictions of a wrong shape or dtype.
Tensor sliding_window_inference(const Tensor& volume, const WindowModel& model, const SlidingWindowOptions& options);

}  // namespace voxgrad::nn
