// Slices with labels laid over them, and curves.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/segment/task.h"

namespace segment {

/// The colour of a class, 0xRRGGBB; the background has none.
uint32_t color_of(int64_t c);

/// The axial, coronal and sagittal slices through the middle of what `of` counts as scored: image, truth, `labels` and
/// where these differ. Writes a PNG file.
void write_overlays(const std::filesystem::path& path, const Case& of, const voxgrad::Tensor& labels, const Task& task);

}  // namespace segment
