// Datasets in the folder layout of nnU-Net v2.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "case.h"

namespace nnunet {

/// The dataset.json and the file names of a dataset. Images are not loaded until load() is called.
///
/// A training case consists of imagesTr/CASE_0000.nii.gz for the first channel, imagesTr/CASE_0001.nii.gz for the
/// second and so on, and the label labelsTr/CASE.nii.gz. imagesTs holds the test cases, which have no label.
///
/// dataset.json must contain "channel_names" (or "modality", its former name), "labels", "file_ending" and
/// "numTraining". If there is a label "ignore", it must have the highest number. The following are not supported:
/// labels that are regions, the keys "regions_class_order" and "dataset" (a list of cases), and an
/// "overwrite_image_reader_writer" other than "SimpleITKIO" and "NibabelIO". Other keys are ignored, as in nnU-Net. The
/// caller must choose the normalization of a channel by the name of the channel.
struct DatasetFolder {
  /// Reads dataset.json and lists the files. Throws Error, with the name of the file, if a file is missing or has an
  /// unexpected name, or if dataset.json contradicts the files. Also throws if a required key is missing, if a key is
  /// not supported, or if the channels or the labels are not numbered 0, 1, 2, ...
  explicit DatasetFolder(const std::filesystem::path& folder);

  /// Returns the image files of a training or test case, one per channel. Throws Error for an unknown case.
  std::vector<std::filesystem::path> images(const std::string& name) const;
  /// Returns the label file of a training case, or an empty path for any other name.
  std::filesystem::path label(const std::string& name) const;
  /// Loads a training or test case with load_case. Throws the errors of load_case.
  Case load(const std::string& name) const;

  std::filesystem::path folder;
  std::string file_ending;            ///< ".nii.gz" or ".nii"
  std::vector<std::string> channels;  ///< name of each channel
  std::vector<std::string> classes;   ///< name of each class, without "ignore"
  int64_t ignore_index = -100;        ///< number of the label "ignore"; -100 if there is none
  std::vector<std::string> training;  ///< names of the cases in imagesTr, sorted
  std::vector<std::string> test;      ///< names of the cases in imagesTs, sorted
};

}  // namespace nnunet
