// What is segmented: cases to train on, and others to test on.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace segment {

using voxgrad::data::Case;

/// A case as its files have it, loaded when it is needed: all of them together may be larger than memory.
struct LazyCase {
  std::string name;
  std::function<Case()> load;
};

struct Task {
  std::string name;                            ///< for reports
  std::vector<std::string> classes;            ///< classes[0]: background
  std::vector<int64_t> scored;                 ///< classes whose Dice counts
  bool ct = false;                             ///< intensities are Hounsfield units
  voxgrad::data::AugmentOptions augment{};     ///< of training patches; elastic deformation in mm
  bool in_memory = true;                       ///< the training cases, preprocessed, fit there; else patches are read
  std::vector<LazyCase> training, validation;  ///< training can end by the validation's Dice
  std::vector<LazyCase> held_out;              ///< nothing is chosen by these; without a label where nobody knows
  std::vector<voxgrad::Tensor> baseline;       ///< of each held-out case: labels that no network made; or empty
  std::string baseline_name;
};

/// Seven structures of a brain, and other grey matter, of Debian's mricron-data (ch2.nii.gz, and AAL's labels of it,
/// Tzourio-Mazoyer et al., NeuroImage 15, 2002): the left half to train on, the right one, mirrored, to test on. As
/// baseline the left half's labels. Throws voxgrad::Error if the package is not there.
Task brain();

/// A folder of nnU-Net's layout. Every fifth case is held out, the one behind it is for validation; where there are
/// fewer than five, the last one is held out, and the training cases are for validation, too. Cases of imagesTs are
/// predicted. Throws voxgrad::Error, with the file's name, for what NnUNetFolder and, of cases that are not for
/// training, load_case refuse; those for training are checked when they are loaded.
Task dataset(const std::filesystem::path& folder);

/// A file of intensities for each file of class numbers: the last pair is held out, or if there is only one, all is
/// measured on what was trained on, and the name says so.
Task files(const std::vector<std::string>& images, const std::vector<std::string>& labels);

/// With elastic deformation in voxels of `spacing` mm, in place of mm.
voxgrad::data::AugmentOptions in_voxels(voxgrad::data::AugmentOptions options, const std::array<double, 3>& spacing);

}  // namespace segment
