// A data set in nnU-Net's folder layout (version 2 of its format).
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "case.h"

namespace nnunet {

/// The cases of a folder: imagesTr/CASE_0000.nii.gz, CASE_0001 for a second channel, ...; labelsTr/CASE.nii.gz;
/// imagesTs with the cases to predict.
///
/// dataset.json must have "channel_names" (or "modality", its former name), "labels", "file_ending" and "numTraining".
/// The label "ignore" must have the highest number. Not supported are labels that are regions, "regions_class_order",
/// "dataset" (a list of cases) and an "overwrite_image_reader_writer" other than "SimpleITKIO" and "NibabelIO". Further
/// keys have no meaning for nnU-Net either. What channel names say about normalization is up to the caller.
struct DatasetFolder {
  /// Throws Error, with a file's name, where a file is missing or has another name, or where dataset.json contradicts
  /// the files, lacks a required key, has an unsupported one or numbers that are not 0, 1, 2, ...
  explicit DatasetFolder(const std::filesystem::path& folder);

  std::vector<std::filesystem::path> images(const std::string& name) const;  ///< a file for each channel
  std::filesystem::path label(const std::string& name) const;                ///< empty for a test case
  /// A case of either list, whose label has class numbers and ignore_index; throws as load_case does.
  Case load(const std::string& name) const;

  std::filesystem::path folder;
  std::string file_ending;                     ///< ".nii.gz" or ".nii"
  std::vector<std::string> channels, classes;  ///< names, by number
  int64_t ignore_index = -100;                 ///< the number of the label "ignore"; -100 if there is none
  std::vector<std::string> training, test;     ///< cases, in alphabetical order
};

}  // namespace nnunet
