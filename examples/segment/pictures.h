// Pictures of slices with overlaid labels.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/segment/task.h"

namespace segment {

/// Returns the color of a class, 0xRRGGBB. The background (class 0) is black.
uint32_t color_of(int64_t c);

/// Writes a PNG file with an axial, a coronal and a sagittal slice of a case, one per row. The slices go through the
/// center of the scored classes. The columns show the image, the true labels, the predicted labels (`labels`), and the
/// voxels where the two differ.
void write_overlays(const std::filesystem::path& path, const Case& c, const voxgrad::Tensor& labels, const Task& task);

}  // namespace segment
