// Draws slices in rows and columns.
#include "examples/common/panels.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "examples/common/canvas.h"

namespace examples {
namespace vg = voxgrad;
namespace {

using Rgb = std::array<double, 3>;  // from 0 to 255

/// Returns the color 0xRRGGBB of a value. NaN has the color of 0.
uint32_t color_of(double value, ColorMap map) {
  constexpr std::array<Rgb, 3> kGray{{{0, 0, 0}, {127.5, 127.5, 127.5}, {255, 255, 255}}};
  constexpr std::array<Rgb, 3> kDiverging{{{33, 82, 168}, {245, 245, 240}, {184, 33, 41}}};
  const std::array<Rgb, 3>& stops = map == ColorMap::gray ? kGray : kDiverging;
  const double position = value > 0 ? 2 * std::min(value, 1.0) : 0;
  const size_t segment = position < 1 ? 0 : 1;
  uint32_t color = 0;
  for (size_t c = 0; c < 3; ++c) {
    const double fraction = position - static_cast<double>(segment);
    const double part = stops[segment][c] + fraction * (stops[segment + 1][c] - stops[segment][c]);
    color = color << 8 | static_cast<uint32_t>(std::lround(part));
  }
  return color;
}

}  // namespace

void write_panels(const std::filesystem::path& path, const Panels& p) {
  constexpr int64_t kGap = 6;     // pixels between slices
  constexpr int64_t kTitle = 24;  // height of the titles of the columns in pixels
  constexpr int64_t kLetter = 7;  // width of a letter in pixels
  constexpr uint32_t kBackground = 0x202020;
  constexpr uint32_t kText = 0xe0e0e0;
  vg::check(p.slices.size() == p.rows.size() * p.columns.size(), "write_panels", "expects ", p.rows.size(), " x ",
            p.columns.size(), " slices, got ", p.slices.size());
  size_t letters = 0;
  for (const std::string& row : p.rows) letters = std::max(letters, row.size());
  const int64_t left_margin = letters == 0 ? kGap : kLetter * static_cast<int64_t>(letters) + 3 * kGap;
  Canvas canvas(left_margin + std::ssize(p.columns) * (p.width + kGap), kTitle + std::ssize(p.rows) * (p.height + kGap),
                kBackground);
  for (int64_t i = 0; i < std::ssize(p.slices); ++i) {
    const int64_t row = i / std::ssize(p.columns), column = i % std::ssize(p.columns);
    const int64_t left = left_margin + column * (p.width + kGap), top = kTitle + row * (p.height + kGap);
    const Canvas::Point center{static_cast<double>(left) + static_cast<double>(p.width) / 2,
                               static_cast<double>(top) + static_cast<double>(p.height) / 2};
    if (row == 0) canvas.text({center[0], kTitle / 2.0}, 0.5, p.columns[static_cast<size_t>(column)], kText);
    if (column == 0)
      canvas.text({static_cast<double>(left_margin - kGap), center[1]}, 1, p.rows[static_cast<size_t>(row)], kText);
    const vg::Tensor slice = p.slices[static_cast<size_t>(i)].unsqueeze(0).unsqueeze(0);
    const vg::Tensor fitted =
        vg::interpolate(slice, {.size = vg::Extent<2>(p.height, p.width), .mode = vg::InterpolateMode::bilinear});
    std::vector<uint32_t> pixels;
    for (const float value : fitted.to_vector<float>()) pixels.push_back(color_of(value, p.color_map));
    canvas.pixels(left, top, p.width, p.height, pixels);
  }
  canvas.save(path);
}

}  // namespace examples
