// The task: classes, and cases to train on, to validate on and to predict.
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

/// nnU-Net's normalizations of a channel: by mean and standard deviation, by the intensities of the training cases'
/// foreground (CT), none, by the channel's minimum and maximum to [0, 1], or from [0, 255] to [0, 1].
enum class Normalization : uint8_t { z_score, ct, none, rescale_to_0_1, rgb_to_0_1 };

/// The normalization that nnU-Net selects by the name of a channel in dataset.json, in upper or lower case: "CT",
/// "noNorm", "rescale_to_0_1" (formerly "rescale_0_1") or "rgb_to_0_1". Other names select z_score.
Normalization normalization_of(const std::string& channel);

/// A case as its files have it, loaded when it is needed: all of them together may be larger than memory.
struct LazyCase {
  std::string name;
  std::function<Case()> load;
};

struct Task {
  std::string name;                          ///< for reports
  std::vector<std::string> classes;          ///< classes[0]: background
  std::vector<int64_t> scored;               ///< classes whose Dice counts
  int64_t ignore_index = -100;               ///< voxels of this class count in no loss and no Dice; negative: none
  std::vector<Normalization> normalization;  ///< of each channel
  voxgrad::data::AugmentOptions augment{};   ///< of training patches; elastic deformation in mm
  bool in_memory = true;  ///< whether the preprocessed training cases fit into memory; otherwise patches are read
  std::vector<LazyCase> training;
  /// Measured during training (--patience can end it by their Dice). A voxel that counts here is ignored in `training`
  /// or not part of it.
  std::vector<LazyCase> validation;
  std::string validated_on;  ///< for reports: "slices 117 to 120 along y of left half"
  /// Predicted after training. Test cases of nnU-Net's layout have no label.
  std::vector<LazyCase> predicted;
  std::string predicted_as;               ///< for reports: "test" or "validation"
  std::vector<voxgrad::Tensor> baseline;  ///< of each predicted case: labels that no network made; or empty
  std::string baseline_name;
};

/// Seven structures of the brain, and other grey matter, of Debian's mricron-data (ch2.nii.gz, and AAL's labels of it,
/// Tzourio-Mazoyer et al., NeuroImage 15, 2002). Trains on the left half but for a slab of it, validates on the slab
/// and tests on the right half, mirrored. The baseline are the left half's labels. Throws voxgrad::Error if the package
/// is not installed.
Task brain();

/// A folder of nnU-Net's layout. Validates on the cases of nnU-Net's fold 0 and trains on the others; a single case is
/// split by slices (find_slab). Predicts the validation cases and those of imagesTs. Throws voxgrad::Error, with the
/// file's name, for what nnunet::DatasetFolder refuses, and for validation and test cases that load_case refuses;
/// training cases are checked when they are loaded.
Task dataset(const std::filesystem::path& folder);

/// A file of intensities for each file of class numbers. Validates on the last pair and trains on the others; a single
/// pair is split by slices.
Task files(const std::vector<std::string>& images, const std::vector<std::string>& labels);

/// Returns `options` with elastic deformation in voxels of `spacing` instead of mm.
voxgrad::data::AugmentOptions in_voxels(voxgrad::data::AugmentOptions options, const std::array<double, 3>& spacing);

}  // namespace segment
