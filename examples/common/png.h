// Grey pictures as PNG files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace examples {

/// Rows of grey values, 0 black to 255 white.
struct GreyImage {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> pixels;

  GreyImage() = default;
  GreyImage(int64_t image_width, int64_t image_height, uint8_t value)
      : width(image_width), height(image_height), pixels(static_cast<size_t>(image_width * image_height), value) {}
  uint8_t& at(int64_t x, int64_t y) { return pixels[static_cast<size_t>(y * width + x)]; }
};

/// Writes the picture, whole or not at all. Throws voxgrad::Error.
void save_png(const std::filesystem::path& path, const GreyImage& image);

}  // namespace examples
