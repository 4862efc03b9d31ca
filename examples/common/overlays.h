// Pictures of slices with overlaid labels.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <voxgrad.h>

namespace examples {

/// A volume and its labels.
struct Overlays {
  voxgrad::Tensor image;                               ///< (D, H, W) f32
  voxgrad::Tensor labels;                              ///< predicted labels (D, H, W); 0 is the background
  voxgrad::Tensor truth{};                             ///< true labels (D, H, W), or undefined
  std::vector<std::pair<int64_t, std::string>> names;  ///< labels and their names, for the legend
  std::vector<int64_t> centered{};                     ///< the slices go through the mean center of these labels
  int64_t ignore_index = -100;                         ///< true label of voxels that are not compared
};

/// Writes a PNG file with an axial, a coronal and a sagittal slice, one per row. The columns show the image, the true
/// labels, the predicted labels, and the voxels where these labels differ. Without true labels, the columns show the
/// image and the predicted labels.
void write_overlays(const std::filesystem::path& path, const Overlays& overlays);

}  // namespace examples
