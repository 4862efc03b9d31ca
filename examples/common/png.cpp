#include "examples/common/png.h"

#include <png.h>

#include "core/atomic_file.h"
#include "core/error.h"

namespace examples {

void save_png(const std::filesystem::path& path, const GreyImage& image) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.width = static_cast<png_uint_32>(image.width);
  header.height = static_cast<png_uint_32>(image.height);
  header.format = PNG_FORMAT_GRAY;
  png_alloc_size_t size = 0;
  const auto write = [&](void* memory) {
    if (!png_image_write_to_memory(&header, memory, &size, 0, image.pixels.data(), 0, nullptr))
      voxgrad::fail("save_png", path.string(), ": ", header.message);
  };
  write(nullptr);  // asks for the size
  std::vector<char> bytes(size);
  write(bytes.data());
  voxgrad::write_file(path, {bytes.data(), size}, "save_png");
}

}  // namespace examples
