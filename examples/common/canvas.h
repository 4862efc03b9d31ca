// A canvas for pictures of pixels, lines and text, which are saved as PNG files.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

typedef struct _cairo cairo_t;  // defined in cairo.h

namespace examples {

/// A picture with functions that draw on it. Positions are in pixels from the upper left corner; colors are 0xRRGGBB.
/// The constructor and save() throw voxgrad::Error if a side exceeds 32767 pixels or if memory runs out.
class Canvas {
 public:
  using Point = std::array<double, 2>;  // x, y

  Canvas(int64_t width, int64_t height, uint32_t background);

  /// Draws a block of pixels: gray values from 0 (black) to 255 (white), or colors, in row-major order. Throws
  /// voxgrad::Error if the block exceeds the picture or if there is not one value per pixel.
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint8_t> values);
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint32_t> colors);
  /// Draws a line through `points`, `width` pixels wide.
  void line(std::span<const Point> points, uint32_t color, double width);
  /// Fills the polygon with the corners `points`.
  void polygon(std::span<const Point> points, uint32_t color);
  /// Draws a line of ASCII text, vertically centered at `at`. The text starts there if `align` is 0, is centered there
  /// if it is 0.5, and ends there if it is 1.
  void text(Point at, double align, const std::string& line, uint32_t color);
  /// Writes a PNG file. If this fails, an existing file is not changed.
  void save(const std::filesystem::path& path) const;

 private:
  /// Selects a color and adds the points to cairo's current path.
  void trace(std::span<const Point> points, uint32_t color);

  std::unique_ptr<cairo_t, void (*)(cairo_t*)> context_;
};

}  // namespace examples
