// Curves over steps, as PNG files.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "examples/common/canvas.h"

namespace examples {

/// A quantity over the steps at which it was measured, in their order. Of more than 100 points the mean and the range
/// of each hundredth of them is drawn. Where `logarithmic`, values count as at least 1e-30.
struct Curve {
  std::string title;
  std::vector<Canvas::Point> points;  ///< step, value
  bool logarithmic = false;
};

/// Draws them below each other; those without points are left out.
void write_curves(const std::filesystem::path& path, std::span<const Curve> curves);

}  // namespace examples
