// A data set in nnU-Net's folder layout (version 2 of its format).
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "segmentation.h"

namespace voxgrad::data {

/// What dataset.json says, and what imagesTr, labelsTr and imagesTs hold: imagesTr/CASE_0000.nii.gz, CASE_0001 for a
/// second channel, ...; labelsTr/CASE.nii.gz.
struct NnUNetFolder {
  /// Lists the folder. Throws Error, with a file's name, where something is missing or dataset.json lies: numTraining,
  /// channels or labels without a file or a case, files under other names, labels that are not 0, 1, 2, ...
  /// Labels of several regions are not supported.
  explicit NnUNetFolder(const std::filesystem::path& folder);

  std::vector<std::filesystem::path> images(const std::string& name) const;  ///< a file for each channel
  std::filesystem::path label(const std::string& name) const;                ///< empty for a test case
  /// A case of either list; throws as load_case does.
  Case load(const std::string& name) const;

  std::filesystem::path folder;
  std::string file_ending;                     ///< ".nii.gz" or ".nii"
  std::vector<std::string> channels, classes;  ///< names, by number
  std::vector<std::string> training, test;     ///< cases, in alphabetical order
};

}  // namespace voxgrad::data
