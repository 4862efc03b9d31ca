// Random changes to training samples: nnU-Net's augmentation, of whole batches, on the device where they lie.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../core/random.h"
#include "../../ops/grid_sample.h"
#include "dataset.h"

namespace voxgrad::data {

/// A step that a sample goes through with probability `p`, each of its channels with probability `channel_p` then, with
/// numbers from [low, high].
struct AugmentStep {
  double p, low, high;
  double channel_p = 1;
};

/// Steps in the order in which they run. Defaults are those of nnU-Net v2 (nnUNetTrainer.get_training_transforms, its
/// transforms those of batchgeneratorsv2; Isensee et al., "nnU-Net", Nature Methods 18, 2021), for volumes of a similar
/// spacing along all axes. For anisotropic ones nnU-Net rotates and scales within planes: rotation {0.2, -180, 180},
/// rotation_axes {true, false, false}, resampled_axes {false, true, true}. So do images, which are volumes of depth 1.
struct AugmentOptions {
  /// D, H, W of the result, at the centre of the input, which is larger so that corners are filled after a rotation; by
  /// default the input's size.
  std::optional<Triple> size{};
  /// What lies outside of the image. Outside of the label map is class 0.
  GridSampleOptions::Padding padding_mode = GridSampleOptions::Padding::zeros;

  /// Degrees, drawn for each axis, about the centre; of voxels, whatever their spacing.
  AugmentStep rotation{0.2, -30, 30};
  std::array<bool, 3> rotation_axes{true, true, true};
  /// How many voxels of the input a voxel of the result steps over, along all axes: beyond 1 the image gets smaller.
  AugmentStep scaling{0.2, 0.7, 1.4};
  /// Axes that scaling, elastic deformation and low resolution act along.
  std::array<bool, 3> resampled_axes{true, true, true};
  /// Standard deviation, in voxels, of how far control points of a cubic B-spline are displaced, which stand
  /// `elastic_spacing` voxels apart (Çiçek et al., "3D U-Net", MICCAI 2016). nnU-Net does without.
  AugmentStep elastic{0, 0, 4};
  double elastic_spacing = 32;

  /// Standard deviation of normal noise, the same in all channels, in units of the image. (nnU-Net calls it variance.)
  AugmentStep noise{0.1, 0, 0.1};
  /// Sigma of a Gaussian in voxels, drawn for each channel and axis; cut off behind about three sigma, ends reflected.
  AugmentStep blur{0.2, 0.5, 1, 0.5};
  /// A factor for each channel. Here, for contrast and for gamma numbers below and above 1 are equally likely.
  AugmentStep brightness{0.15, 0.75, 1.25};
  /// A factor for each channel's distances from its mean; what leaves the channel's range is clipped.
  AugmentStep contrast{0.15, 0.75, 1.25};
  /// Voxels along an axis, relative to those of the input and at least 0.001, to which a channel is brought by nearest
  /// neighbours, and back by trilinear interpolation.
  AugmentStep low_resolution{0.25, 0.5, 1, 0.5};
  /// An exponent for each channel, brought to [0, 1], whose mean and standard deviation are kept. Of -x, and of x.
  AugmentStep gamma_inverted{0.1, 0.7, 1.5};
  AugmentStep gamma{0.3, 0.7, 1.5};
  /// Probability of mirroring along each of mirror_axes.
  double mirror_p = 0.5;
  std::array<bool, 3> mirror_axes{true, true, true};
};

/// What one sample goes through, in the units of AugmentOptions; as it is, nothing. Axes are D, H, W.
struct AugmentParams {
  struct Channel {
    std::array<double, 3> blur{};
    double brightness = 1, contrast = 1, low_resolution = 1, gamma_inverted = 1, gamma = 1;
  };

  std::array<double, 3> rotation{}, scaling{1, 1, 1};
  double elastic = 0, noise = 0;
  std::array<bool, 3> mirror{};
  uint64_t seed = 0;  ///< of the noise and of the control points' displacements
  std::vector<Channel> channels{};
};

/// augment(batch, generator) on the way from the loader to the model:
///
///   const data::Augmentation augment({.size = Triple(128)});
///   for (const data::Sample& batch : loader) {
///     const auto [x, y] = augment({batch.input.to(device), batch.target.to(device)}, generator);
///
/// Parameters are drawn on the host; then all runs on the batch's device, alike on all of them to rounding, and nothing
/// waits for it. Steps that no sample drew cost nothing. Threads may use one object, each with its own generator.
class Augmentation {
 public:
  /// Throws for probabilities outside [0, 1] and ranges that make no sense.
  explicit Augmentation(const AugmentOptions& options = {});

  /// Parameters of each sample, from `random` alone.
  std::vector<AugmentParams> draw(int64_t samples, int64_t channels, Generator& random) const;

  /// input (N, C, D, H, W) of a floating dtype, in which the result is, with its memory format; halves are computed in
  /// f32 and rounded once. target: class numbers of an integer dtype below 2^24, (N, 1, D, H, W) or (N, D, H, W), or
  /// undefined; it is resampled with the input, by nearest neighbours. New tensors, not recorded by autograd. Throws
  /// for other shapes, dtypes or devices, a result larger than the input, and parameters of another number of samples
  /// or channels.
  Sample apply(const Sample& batch, const std::vector<AugmentParams>& params) const;

  /// apply() with what draw() gives.
  Sample operator()(const Sample& batch, Generator& random) const;

 private:
  AugmentOptions options_;
};

}  // namespace voxgrad::data
