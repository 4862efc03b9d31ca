#include "examples/segment/checksum.h"

#include <zlib.h>

namespace segment {
namespace vg = voxgrad;
namespace {

uint32_t of_bytes(const void* data, size_t size, uint32_t before) {
  return static_cast<uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), size));
}

}  // namespace

uint32_t checksum(const vg::Tensor& tensor, uint32_t before) {
  const vg::Tensor dense = tensor.contiguous();
  return of_bytes(dense.raw_data(), static_cast<size_t>(dense.numel() * vg::item_size(dense.dtype())), before);
}

uint32_t checksum(const Case& of) {
  return of_bytes(of.geometry.spacing.data(), sizeof of.geometry.spacing, checksum(of.label, checksum(of.image)));
}

uint32_t checksum(const Preprocessing& of, uint32_t before) {
  const auto add = [](const auto& values, uint32_t sum) {
    return of_bytes(values.data(), values.size() * sizeof values[0], sum);
  };
  return add(of.intensities, add(of.normalization, add(of.spacing, before)));
}

}  // namespace segment
