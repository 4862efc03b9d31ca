// Pictures of a run: slices of the test volumes, and the loss curve.
#pragma once

#include <filesystem>
#include <vector>

#include "examples/superres/report.h"

namespace superres {

/// Writes a PNG file with the middle axial, coronal and sagittal slice, one per row. The columns show the low
/// resolution (enlarged), the trilinear interpolation, the network's result, the truth, and the network's error,
/// amplified five times. The top of the picture is the front of the head in the axial slice, and the top of the head in
/// the other slices. The right of the picture is the subject's right in the axial and coronal slices, and the front of
/// the head in the sagittal slice.
void write_slices(const std::filesystem::path& path, const TestResult& test);

/// Writes a PNG file with the losses over the steps, on a logarithmic axis. See examples::Curve. `losses` must not be
/// empty.
void write_loss_curve(const std::filesystem::path& path, const std::vector<LossLine>& losses);

}  // namespace superres
