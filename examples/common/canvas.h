// Pictures of pixels, lines and text, as PNG files.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

typedef struct _cairo cairo_t;  // cairo.h

namespace examples {

/// A picture that is drawn upon. Places are in pixels from the upper left corner; colours are 0xRRGGBB. Throws
/// voxgrad::Error where a picture is too large (32767 pixels a side) or there is no memory for it.
class Canvas {
 public:
  using Point = std::array<double, 2>;  // x, y

  Canvas(int64_t width, int64_t height, uint32_t background);

  /// Rows of grey values, 0 black to 255 white, or of colours. Throws if they do not lie within the picture.
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint8_t> values);
  void pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint32_t> colors);
  void line(std::span<const Point> points, uint32_t color, double width);
  void polygon(std::span<const Point> points, uint32_t color);
  /// A line of ASCII whose middle is at `at`; `align` is what lies there: 0 the text's beginning, 0.5 its middle, 1 its
  /// end.
  void text(Point at, double align, const std::string& line, uint32_t color);
  /// Writes the picture, whole or not at all.
  void save(const std::filesystem::path& path) const;

 private:
  void trace(std::span<const Point> points, uint32_t color);

  std::unique_ptr<cairo_t, void (*)(cairo_t*)> context_;
};

}  // namespace examples
