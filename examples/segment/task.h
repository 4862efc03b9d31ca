// Segmentation tasks: the classes, and the cases for training, validation and prediction.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"

namespace segment {

using nnunet::Case;

/// Returns the normalization that nnU-Net selects for the name of a channel in dataset.json: "CT", "noNorm",
/// "rescale_to_0_1" (formerly "rescale_0_1") or "rgb_to_0_1", in upper or lower case. Other names select z_score.
nnunet::Normalization normalization_of(const std::string& channel);

/// A case that is loaded from its files each time it is needed, because all cases together may be larger than memory.
struct LazyCase {
  std::string name;
  std::function<Case()> load;
};

/// A segmentation task.
struct Task {
  std::filesystem::path dataset_json{};  ///< path of dataset.json; empty unless dataset() made the task
  std::string name;                      ///< shown in reports
  std::vector<std::string> classes;      ///< names; classes[0] is the background
  std::vector<int64_t> scored;           ///< classes whose Dice enters the mean
  int64_t ignore_index = -100;           ///< label of voxels that the loss and the Dice ignore; negative: no such label
  std::vector<std::string> channels;     ///< names; normalization_of() selects the normalization
  voxgrad::data::AugmentOptions augment{};  ///< for training patches; the elastic deformation is in mm, see in_voxels()
  bool in_memory = true;                    ///< true: keep preprocessed training cases in memory; false: in files
  std::vector<LazyCase> training;
  /// Cases whose Dice is measured during training. --patience stops the training if this Dice no longer rises. Except
  /// in generated(), no voxel is used for both training and validation: if a case is in both lists, each of its voxels
  /// has the label ignore_index in at least one of the lists.
  std::vector<LazyCase> validation;
  std::string validated_on;         ///< shown in reports: "slices 117 to 120 along y of left half"
  std::vector<LazyCase> predicted;  ///< cases to predict after training; nnU-Net's test cases have no label
  std::string predicted_as;         ///< shown in reports: "test" or "validation"
  /// Label maps that were made without a network, one per predicted case. Reports compare their Dice with the Dice of
  /// the network. Empty if the task has no baseline.
  std::vector<voxgrad::Tensor> baseline;
  std::string baseline_name;  ///< heading of the column of the baseline
};

/// Returns the default task: the segmentation of seven structures of the brain and the other gray matter. The volume is
/// ch2.nii.gz of Debian's package mricron-data; the labels are those of the AAL atlas (Tzourio-Mazoyer et al.,
/// NeuroImage 15, 2002). Trains on the left half of the brain except for a slab, validates on the slab, and tests on
/// the mirrored right half. The baseline predicts the labels of the left half. Throws voxgrad::Error if the package is
/// not installed.
Task brain();

/// Returns the task of a folder in nnU-Net's layout. Validates on the cases of nnU-Net's fold 0 and trains on the other
/// cases; a single case is divided by find_slab. Predicts the validation cases and the cases of imagesTs. Throws the
/// errors of nnunet::DatasetFolder and, for validation and test cases, of nnunet::load_case. Training cases are checked
/// later, when they are loaded.
Task dataset(const std::filesystem::path& folder);

/// Returns the task of single-channel NIfTI files: labels[i] holds the class indices of images[i]. Validates on the
/// last pair and trains on the other pairs; a single pair is divided by find_slab.
Task files(const std::vector<std::string>& images, const std::vector<std::string>& labels);

/// Returns a task of four generated volumes of 160^3 voxels, each with a ball. Training stores the preprocessed volumes
/// in files, as for a dataset. The first training case is also the case for validation and prediction.
Task generated();

/// Converts the lengths of the elastic deformation from mm to voxels. `spacing` is the voxel spacing in mm.
voxgrad::data::AugmentOptions in_voxels(voxgrad::data::AugmentOptions options, const std::array<double, 3>& spacing);

}  // namespace segment
