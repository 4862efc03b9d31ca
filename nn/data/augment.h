// nnU-Net's data augmentation: random changes to whole batches of training samples, on the device of the batch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../core/random.h"
#include "../../ops/grid_sample.h"
#include "dataset.h"

namespace voxgrad::data {

/// Options of one step of the augmentation. Random parameters of the step are drawn from [low, high].
struct AugmentStep {
  double p;     ///< probability that the step applies to a sample
  double low;   ///< lower bound of the random parameters
  double high;  ///< upper bound of the random parameters
  /// Probability that a channel is changed if the step applies to the sample. Only the steps with parameters in
  /// AugmentParams::Channel use this probability.
  double channel_p = 1;
};

/// Options of Augmentation, in the order in which the steps run. The defaults are those of nnU-Net v2
/// (nnUNetTrainer.get_training_transforms with the transforms of batchgeneratorsv2; Isensee et al., "nnU-Net", Nature
/// Methods 18, 2021) for volumes with a similar spacing along all axes. For anisotropic volumes, and for images, which
/// have D = 1, nnU-Net rotates and scales only within the H-W plane. The equivalent options are rotation {0.2, -180,
/// 180}, rotation_axes {true, false, false}, resampled_axes {false, true, true}.
struct AugmentOptions {
  /// D, H, W of the result, by default those of the input. The result is taken from the center of the input. A larger
  /// input avoids empty corners after a rotation.
  std::optional<Triple> size{};
  /// Selects the values outside of the input image. Labels outside of the image are 0.
  GridSampleOptions::Padding padding_mode = GridSampleOptions::Padding::zeros;

  /// Rotation about the center in degrees, drawn for each axis. The spacing of the voxels is ignored.
  AugmentStep rotation{0.2, -30, 30};
  std::array<bool, 3> rotation_axes{true, true, true};  ///< axes of rotation (D, H, W)
  /// Number of input voxels per voxel of the result, the same along all axes. Values above 1 make objects smaller.
  AugmentStep scaling{0.2, 0.7, 1.4};
  /// Axes (D, H, W) along which scaling, elastic deformation and low resolution apply.
  std::array<bool, 3> resampled_axes{true, true, true};
  /// Elastic deformation by a cubic B-spline: the standard deviation of the displacement of its control points, in
  /// voxels (Çiçek et al., "3D U-Net", MICCAI 2016). nnU-Net does not use elastic deformation by default.
  AugmentStep elastic{0, 0, 4};
  double elastic_spacing = 32;  ///< distance of the control points in voxels

  /// Standard deviation of Gaussian noise in units of the image. All channels get the same noise. nnU-Net calls this
  /// parameter the variance.
  AugmentStep noise{0.1, 0, 0.1};
  /// Sigma of a Gaussian blur in voxels, drawn for each channel and axis. The kernel is truncated at about three sigma,
  /// and the edges are reflected.
  AugmentStep blur{0.2, 0.5, 1, 0.5};
  /// Factor that multiplies a channel. For brightness, contrast and both gamma steps, values below and above 1 are
  /// equally likely.
  AugmentStep brightness{0.15, 0.75, 1.25};
  /// Factor that multiplies a channel's differences from its mean. The result is clipped to the range of the channel.
  AugmentStep contrast{0.15, 0.75, 1.25};
  /// Simulated low resolution: the size of the reduced channel along an axis, as a fraction of the original size, at
  /// least 0.001. A channel is reduced by nearest-neighbor interpolation and enlarged by trilinear interpolation.
  AugmentStep low_resolution{0.25, 0.5, 1, 0.5};
  /// Exponent of the gamma step on the negated channel. The step scales the channel to [0, 1], raises it to the
  /// exponent, and then restores the mean and the standard deviation.
  AugmentStep gamma_inverted{0.1, 0.7, 1.5};
  /// Exponent of the same step without the negation.
  AugmentStep gamma{0.3, 0.7, 1.5};
  /// Probability of mirroring along each of mirror_axes (D, H, W).
  double mirror_p = 0.5;
  std::array<bool, 3> mirror_axes{true, true, true};
};

/// The parameters of the steps for one sample, in the units of AugmentOptions. The defaults change nothing. Arrays are
/// indexed by axis (D, H, W).
struct AugmentParams {
  /// The parameters for one channel.
  struct Channel {
    std::array<double, 3> blur{};
    double brightness = 1;
    double contrast = 1;
    double low_resolution = 1;
    double gamma_inverted = 1;
    double gamma = 1;
  };

  std::array<double, 3> rotation{};
  std::array<double, 3> scaling{1, 1, 1};
  double elastic = 0;
  double noise = 0;
  std::array<bool, 3> mirror{};
  uint64_t seed = 0;  ///< seed of the noise and of the elastic displacements
  std::vector<Channel> channels{};
};

/// Augments batches between the loader and the model:
///
///     const data::Augmentation augment({.size = Triple(128)});
///     for (const data::Sample& batch : loader) {
///       const auto [x, y] = augment({batch.input.to(device), batch.target.to(device)}, generator);
///
/// Parameters are drawn on the host. All steps then run on the device of the batch, and the host does not wait for the
/// steps. Results on different devices agree up to rounding. Steps that apply to no sample cost no time. Several
/// threads may use one object, each with its own generator.
class Augmentation {
 public:
  /// Throws Error for probabilities outside [0, 1] and for invalid ranges.
  explicit Augmentation(const AugmentOptions& options = {});

  /// Draws the parameters of each sample. The parameters depend only on the options and on `random`.
  std::vector<AugmentParams> draw(int64_t samples, int64_t channels, Generator& random) const;

  /// Applies the steps to a batch and returns new tensors. The input is (N, C, D, H, W) of a floating-point dtype; the
  /// result has its dtype and memory format. bf16 and f16 are computed in f32 and rounded once. The target is (N, 1, D,
  /// H, W) or (N, D, H, W) of an integer dtype and contains class indices below 2^24. The target is rotated, scaled,
  /// deformed and mirrored like the input, with nearest-neighbor interpolation, and may be undefined. Autograd does not
  /// record the steps. Throws Error for other shapes, dtypes or devices, for a result larger than the input, and if the
  /// parameters were drawn for a different number of samples or channels.
  Sample apply(const Sample& batch, const std::vector<AugmentParams>& params) const;

  /// Draws parameters and applies them: apply(batch, draw(N, C, random)).
  Sample operator()(const Sample& batch, Generator& random) const;

 private:
  AugmentOptions options_;
};

}  // namespace voxgrad::data
