// Implements the canvas with cairo.
#include "examples/common/canvas.h"

#include <cairo.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace examples {
namespace {

constexpr double kTextSize = 14;

void check_status(cairo_status_t status) {
  voxgrad::check(status == CAIRO_STATUS_SUCCESS, "Canvas", cairo_status_to_string(status));
}

cairo_status_t append(void* text, const unsigned char* bytes, unsigned count) {
  try {
    static_cast<std::string*>(text)->append(reinterpret_cast<const char*>(bytes), count);
    return CAIRO_STATUS_SUCCESS;
  } catch (...) {  // an exception must not pass through cairo, which is written in C
    return CAIRO_STATUS_NO_MEMORY;
  }
}

}  // namespace

Canvas::Canvas(int64_t width, int64_t height, uint32_t background) : context_(nullptr, cairo_destroy) {
  constexpr int64_t kMaxSize = 32767;  // cairo's limit
  voxgrad::check(width > 0 && height > 0 && width <= kMaxSize && height <= kMaxSize, "Canvas",
                 "width and height must be from 1 to ", kMaxSize, " pixels, got ", width, " x ", height);
  cairo_surface_t* surface =
      cairo_image_surface_create(CAIRO_FORMAT_RGB24, static_cast<int>(width), static_cast<int>(height));
  context_.reset(cairo_create(surface));
  cairo_surface_destroy(surface);  // the context holds a reference
  check_status(cairo_status(context_.get()));
  const double right = static_cast<double>(width), bottom = static_cast<double>(height);
  polygon(std::array<Point, 4>{{{0, 0}, {right, 0}, {right, bottom}, {0, bottom}}}, background);
  // cairo's built-in font looks the same on every machine and needs no installed fonts.
  cairo_select_font_face(context_.get(), "@cairo:", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(context_.get(), kTextSize);
}

void Canvas::pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint8_t> values) {
  std::vector<uint32_t> colors;
  for (const uint8_t value : values) colors.push_back(0x010101u * value);
  pixels(left, top, width, height, colors);
}

void Canvas::pixels(int64_t left, int64_t top, int64_t width, int64_t height, std::span<const uint32_t> colors) {
  cairo_surface_t* surface = cairo_get_target(context_.get());
  const bool fits = left >= 0 && top >= 0 && left + width <= cairo_image_surface_get_width(surface) &&
                    top + height <= cairo_image_surface_get_height(surface);
  voxgrad::check(fits, "Canvas", width, " x ", height, " pixels at ", left, ", ", top, " exceed the picture");
  voxgrad::check(std::ssize(colors) == width * height, "Canvas", "a block of ", width, " x ", height,
                 " pixels needs one value per pixel, got ", colors.size());
  cairo_surface_flush(surface);
  unsigned char* data = cairo_image_surface_get_data(surface);
  const int64_t stride = cairo_image_surface_get_stride(surface);
  for (int64_t y = 0; y < height; ++y) {
    auto* row = reinterpret_cast<uint32_t*>(data + (top + y) * stride) + left;
    std::copy_n(colors.begin() + y * width, width, row);
  }
  cairo_surface_mark_dirty(surface);
}

void Canvas::trace(std::span<const Point> points, uint32_t color) {
  cairo_set_source_rgb(context_.get(), (color >> 16 & 255) / 255.0, (color >> 8 & 255) / 255.0, (color & 255) / 255.0);
  for (const auto& [x, y] : points) cairo_line_to(context_.get(), x, y);
}

void Canvas::line(std::span<const Point> points, uint32_t color, double width) {
  trace(points, color);
  cairo_set_line_width(context_.get(), width);
  cairo_stroke(context_.get());
}

void Canvas::polygon(std::span<const Point> points, uint32_t color) {
  trace(points, color);
  cairo_fill(context_.get());
}

void Canvas::text(Point at, double align, const std::string& line, uint32_t color) {
  cairo_text_extents_t extents;
  cairo_text_extents(context_.get(), line.c_str(), &extents);
  // 0.35 * kTextSize is half the height of a capital letter.
  const Point start{at[0] - align * extents.x_advance, at[1] + 0.35 * kTextSize};
  trace({&start, 1}, color);
  cairo_show_text(context_.get(), line.c_str());
  cairo_new_path(context_.get());
}

void Canvas::save(const std::filesystem::path& path) const {
  check_status(cairo_status(context_.get()));
  std::string bytes;
  check_status(cairo_surface_write_to_png_stream(cairo_get_target(context_.get()), append, &bytes));
  voxgrad::write_file(path, bytes, "Canvas");
}

}  // namespace examples
