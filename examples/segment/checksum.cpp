// Implements the checksums of cases and of their preprocessing.
#include "examples/segment/checksum.h"

#include <zlib.h>

namespace segment {
namespace vg = voxgrad;
namespace {

uint32_t checksum_bytes(const void* data, size_t size, uint32_t before) {
  return static_cast<uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), size));
}

}  // namespace

uint32_t checksum(const vg::Tensor& tensor, uint32_t before) {
  const vg::Tensor dense = tensor.contiguous();
  return checksum_bytes(dense.raw_data(), static_cast<size_t>(dense.numel() * vg::item_size(dense.dtype())), before);
}

uint32_t checksum(const Case& c) {
  return checksum_bytes(c.geometry.spacing.data(), sizeof c.geometry.spacing, checksum(c.label, checksum(c.image)));
}

uint32_t checksum(const nnunet::ModelPlan& plan, uint32_t before) {
  uint32_t sum = before;
  const auto add = [&](const auto& value) { sum = checksum_bytes(&value, sizeof value, sum); };
  add(plan.orientation);
  add(plan.transpose_forward);
  add(plan.is_2d);
  add(plan.spacing);
  add(plan.resample_image.order);
  add(plan.resample_image.force_separate_z ? int{*plan.resample_image.force_separate_z} : -1);
  for (const nnunet::ChannelPlan& channel : plan.normalization) {
    add(channel.kind);
    add(channel.use_mask);
    add(channel.intensities);
  }
  return sum;
}

}  // namespace segment
