// nnU-Net's preprocessing and inference: from the image of a case to a label map.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"

namespace nnunet {

/// The network's input, and the data that are needed to map the network's output back to the voxels of the file. a0, a1
/// and a2 are the sizes of the network's input. All members use the axis order of OrientedImage.
struct PreparedImage {
  voxgrad::Tensor image;         ///< (C, a0, a1, a2) f32
  Spacing spacing{};             ///< spacing of the original voxels, mm
  Spacing network_spacing{};     ///< spacing of the voxels of `image`, mm
  voxgrad::Dims original_shape;  ///< (D, H, W) before the image is cropped
  Box box;                       ///< nonzero region, in original voxels
};

/// An image with the axes in the order in which the network reads them.
struct OrientedImage {
  voxgrad::Tensor image;  ///< (C, D, H, W) f32
  Spacing spacing{};      ///< mm
  voxgrad::Dims order;    ///< axis i of `image` is axis order[i] of the file's (D, H, W)
  voxgrad::Dims flipped;  ///< axes of `image` that were reversed
};

/// Orders and flips the axes of an image (C, D, H, W) as nnU-Net does: first by plan.orientation, then by
/// plan.transpose_forward.
OrientedImage orient(const voxgrad::Tensor& image, const Geometry& geometry, const ModelPlan& plan);
/// Undoes orient() for a result (D, H, W) or (K, D, H, W).
voxgrad::Tensor unorient(const voxgrad::Tensor& result, const OrientedImage& oriented);

/// Crops an image to its nonzero region, normalizes its channels, and resamples it to the spacing of the network. An
/// image of zeros is not cropped.
PreparedImage prepare(const OrientedImage& oriented, const ModelPlan& plan);

/// The input of the network and the labels of its voxels, for training.
struct TrainingVolume {
  voxgrad::Tensor image;  ///< (C, a0, a1, a2) f32
  voxgrad::Tensor label;  ///< (a0, a1, a2) u8
};

/// Applies orient() and prepare() to a labeled case. Resamples labels to the nearest voxel. Throws voxgrad::Error if
/// all voxels of the image are 0.
TrainingVolume prepare_for_training(const Case& labeled, const ModelPlan& plan);

/// Options of predict_logits.
struct PredictOptions {
  double step = 0.5;               ///< distance between neighboring windows as a fraction of their size, in (0, 1]
  bool gaussian = true;            ///< weights the voxels of a window by a Gaussian
  bool half_accumulation = false;  ///< rounds sums to f16, as nnU-Net does
  voxgrad::Device device{};        ///< device of the network
  voxgrad::Device sums{};          ///< device of the sums and of the result
  std::optional<voxgrad::DType> autocast{};                     ///< dtype of autocast; by default, no autocast
  std::function<bool(int64_t done, int64_t total)> progress{};  ///< see SlidingWindowOptions
};

/// Computes the logits (K, a0, a1, a2) of an image (C, a0, a1, a2) by sliding-window inference. `mirror_axes` is
/// Checkpoint::mirror_axes.
voxgrad::Tensor predict_logits(const voxgrad::Tensor& image, const Network& network, const ModelPlan& plan,
                               const voxgrad::Axes& mirror_axes, const PredictOptions& options);

/// Returns the labels (D, H, W) of the original image, u8 or i32. The axes are in the order of `prepared`. Resamples
/// one output at a time on the device of `logits`. Without regions, each voxel gets the label of its largest logit, or
/// of the first of several equal logits. With regions, each voxel gets the label of the last region whose probability
/// exceeds 1/2, or 0 if no probability does.
voxgrad::Tensor labels_of(const voxgrad::Tensor& logits, const PreparedImage& prepared, const ModelPlan& plan);

/// Returns the probabilities (K, D, H, W) f32 of the outputs in the original image, on the CPU. Outside the nonzero
/// region, the background has probability 1 and all other outputs have probability 0.
voxgrad::Tensor probabilities_of(const voxgrad::Tensor& logits, const PreparedImage& prepared, const ModelPlan& plan);

}  // namespace nnunet
