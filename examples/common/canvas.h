// A canvas on which programs draw pixels, lines and text. It can be saved as a PNG file.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

typedef struct _cairo cairo_t;  // defined in cairo.h

namespace examples {

/// A picture and functions that draw on it. Positions are in pixels from the upper left corner; colors are 0xRRGGBB.
/// The constructor throws voxgrad::Error unless both sides have 1 to 32767 pixels. The constructor and save() throw
/// voxgrad::Error if memory runs out.
class Canvas {
 public:
  using Point = std::array<double, 2>;  // x, y

  Canvas(int64_t width, int64_t height, uint32_t background);

  /// Draws a block of pixels in row-major order, from gray values between 0 (black) and 255 (white) or from colors.
  /// Throws voxgrad::Error if the block extends beyond the picture or if the number of values is not width * height.
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint8_t> values);
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint32_t> colors);
  /// Draws line segments from point to point, `width` pixels wide.
  void line(std::span<const Point> points, uint32_t color, double width);
  /// Fills a polygon. `points` are its corners.
  void polygon(std::span<const Point> points, uint32_t color);
  /// Draws a line of ASCII text, vertically centered at `at`. Horizontally, the text starts at `at` if `align` is 0, is
  /// centered there if `align` is 0.5, and ends there if `align` is 1.
  void text(Point at, double align, const std::string& line, uint32_t color);
  /// Writes a PNG file. Throws voxgrad::Error and does not change an existing file if the file cannot be written.
  void save(const std::filesystem::path& path) const;

 private:
  /// Selects a color and adds the points to cairo's current path.
  void trace(std::span<const Point> points, uint32_t color);

  std::unique_ptr<cairo_t, void (*)(cairo_t*)> context_;
};

}  // namespace examples
