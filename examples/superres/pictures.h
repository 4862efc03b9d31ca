// What a run looks like: slices of its tests, and its losses.
#pragma once

#include <filesystem>
#include <vector>

#include "examples/superres/report.h"

namespace superres {

/// The middle axial, coronal and sagittal slices, a row each, front or top upwards and the subject's right (in the
/// sagittal slice the front) to the right: low resolution (enlarged), trilinear, ours, truth, and the error of ours,
/// five times amplified.
void write_slices(const std::filesystem::path& path, const TestResult& test);

/// The losses, at least one, along the steps on a logarithmic axis: the mean of every hundredth of the steps
/// as a line, from the lowest to the highest of them as an area.
void write_loss_curve(const std::filesystem::path& path, const std::vector<LossLine>& losses);

}  // namespace superres
