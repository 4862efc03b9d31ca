// Plots of curves over training steps, as PNG files.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "examples/common/canvas.h"

namespace examples {

/// A quantity that was measured at several training steps. A curve of more than 100 points is divided into 100 bins;
/// the plot then shows the mean and the range of each bin.
struct Curve {
  std::string title;
  std::vector<Canvas::Point> points;  ///< (step, value), in the order of the steps
  bool logarithmic = false;           ///< logarithmic vertical axis; values below 1e-30 are drawn as 1e-30
};

/// Draws the curves one below another and writes a PNG file. Skips curves without points.
void write_curves(const std::filesystem::path& path, std::span<const Curve> curves);

}  // namespace examples
