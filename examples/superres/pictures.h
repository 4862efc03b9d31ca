// Pictures of a run: slices of the test volumes, and the loss curve.
#pragma once

#include <filesystem>
#include <vector>

#include "examples/superres/report.h"

namespace superres {

/// Writes a PNG file with the middle axial, coronal and sagittal slice, one per row. The columns show the
/// low-resolution input (enlarged), the trilinear interpolation, the network's result, the truth, and the network's
/// error, amplified five times. The axial slice has the front of the head at the top and the subject's right on the
/// right. The coronal slice has the top of the head at the top and the subject's right on the right. The sagittal slice
/// has the top of the head at the top and the front of the head on the right.
void write_slices(const std::filesystem::path& path, const TestResult& test);

/// Writes a PNG file with the curve of the losses over the steps; the axis of the losses is logarithmic. `losses` must
/// not be empty.
void write_loss_curve(const std::filesystem::path& path, const std::vector<LossLine>& losses);

}  // namespace superres
