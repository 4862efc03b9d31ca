// Segmentation tasks: the classes, and the cases for training, validation and prediction.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/nnunet/case.h"

namespace segment {

using nnunet::Case;

/// nnU-Net's normalizations of a channel.
enum class Normalization : uint8_t {
  z_score,         ///< to mean 0 and standard deviation 1
  ct,              ///< by nnunet::ct_normalize, with the intensities of the training cases' foreground
  none,            ///< unchanged
  rescale_to_0_1,  ///< from [minimum, maximum] of the channel to [0, 1]
  rgb_to_0_1       ///< from [0, 255] to [0, 1]
};

/// Returns the normalization that nnU-Net selects for the name of a channel in dataset.json: "CT", "noNorm",
/// "rescale_to_0_1" (formerly "rescale_0_1") or "rgb_to_0_1", in upper or lower case. Other names select z_score.
Normalization normalization_of(const std::string& channel);

/// A case that is loaded from its files when needed, because all cases together may be larger than memory.
struct LazyCase {
  std::string name;
  std::function<Case()> load;
};

/// A segmentation task.
struct Task {
  std::string name;                          ///< used in reports
  std::vector<std::string> classes;          ///< names; classes[0] is the background
  std::vector<int64_t> scored;               ///< classes whose Dice enters the mean
  int64_t ignore_index = -100;               ///< label of voxels that loss and Dice ignore; negative: no such label
  std::vector<Normalization> normalization;  ///< per channel
  voxgrad::data::AugmentOptions augment{};   ///< augmentation of training patches; elastic deformation in mm
  bool in_memory = true;                     ///< keep preprocessed training cases in memory; otherwise in files
  std::vector<LazyCase> training;
  /// Cases whose Dice is measured during training and decides when --patience stops the training. A voxel that has a
  /// label here is never used for training: its case is not in `training`, or its label there is ignore_index.
  std::vector<LazyCase> validation;
  std::string validated_on;         ///< used in reports: "slices 117 to 120 along y of left half"
  std::vector<LazyCase> predicted;  ///< cases to predict after training; nnU-Net's test cases have no label
  std::string predicted_as;         ///< used in reports: "test" or "validation"
  /// Label maps made without a network, whose Dice is reported next to that of the network: one per predicted case, or
  /// none.
  std::vector<voxgrad::Tensor> baseline;
  std::string baseline_name;  ///< heading of the column of the baseline
};

/// Returns the default task: seven structures of the brain and the other gray matter, in the volume ch2.nii.gz of
/// Debian's mricron-data with the labels of the AAL atlas (Tzourio-Mazoyer et al., NeuroImage 15, 2002). Trains on the
/// left half of the brain except for a slab, validates on the slab, and tests on the mirrored right half. The baseline
/// is the label of the left half. Throws voxgrad::Error if the package is not installed.
Task brain();

/// Returns the task of a folder in nnU-Net's layout. Validates on the cases of nnU-Net's fold 0 and trains on the
/// others; a single case is split by slices (find_slab). Predicts the validation cases and the cases of imagesTs.
/// Throws what nnunet::DatasetFolder throws, and what nnunet::load_case throws for validation and test cases. Training
/// cases are checked when they are loaded.
Task dataset(const std::filesystem::path& folder);

/// Returns the task of single-channel NIfTI files: labels[i] holds the class indices of images[i]. Validates on the
/// last pair and trains on the others; a single pair is split by slices.
Task files(const std::vector<std::string>& images, const std::vector<std::string>& labels);

/// Converts the lengths of the elastic deformation from mm to voxels. `spacing` is in mm.
voxgrad::data::AugmentOptions in_voxels(voxgrad::data::AugmentOptions options, const std::array<double, 3>& spacing);

}  // namespace segment
