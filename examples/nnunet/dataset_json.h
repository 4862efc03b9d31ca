// The file dataset.json, which dataset folders and model folders of nnU-Net contain.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/nnunet/json.h"

namespace nnunet {

/// The classes that a model predicts.
struct Labels {
  std::vector<std::string> names;           ///< names of the outputs; without regions, names[0] is the background
  bool regions = false;                     ///< true if the outputs are regions, which may overlap
  std::vector<int64_t> values;              ///< label of each output; later regions overwrite earlier regions
  std::vector<std::vector<int64_t>> parts;  ///< labels that each output covers: more than one for regions
};

/// Returns the names of the channels, in the order of their numbers 0, 1, 2, ... The key is "channel_names" or
/// "modality", its former name.
std::vector<std::string> read_channels(const Json& dataset);
/// Returns the labels except "ignore". Throws Error unless there are at least two labels, numbered 0, 1, 2, ..., or
/// regions with "regions_class_order".
Labels read_labels(const Json& dataset);
/// Returns ".nii.gz" or ".nii". Throws Error for other endings.
std::string read_file_ending(const Json& dataset);

}  // namespace nnunet
