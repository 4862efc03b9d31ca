// Pictures that consist of slices in rows and columns.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace examples {

enum class ColorMap : uint8_t {
  gray,      ///< 0 is black, 1 is white
  diverging  ///< 0 is blue, 0.5 is white, 1 is red
};

/// A table of slices, all of which are drawn with the same size.
struct Panels {
  std::vector<std::string> columns{};     ///< title of each column; may be empty
  std::vector<std::string> rows{};        ///< title of each row; may be empty
  std::vector<voxgrad::Tensor> slices{};  ///< (H, W) floating-point, row by row; values outside [0, 1] are clamped
  int64_t height = 0;                     ///< height of each drawn slice in pixels
  int64_t width = 0;                      ///< width of each drawn slice in pixels
  ColorMap color_map = ColorMap::gray;
};

/// Writes a PNG file. Slices of a different size are interpolated linearly to height x width pixels. Throws Error
/// unless the number of slices is rows.size() * columns.size().
void write_panels(const std::filesystem::path& path, const Panels& panels);

}  // namespace examples
