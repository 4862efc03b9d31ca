// zlib's CRC-32 of what cases and their preprocessing are.
#pragma once

#include <cstdint>

#include <voxgrad.h>

#include "examples/segment/preprocess.h"

namespace segment {

/// Each goes on from `before`, the checksum of what comes first. Of a tensor on the CPU: its elements in row-major
/// order.
uint32_t checksum(const voxgrad::Tensor& tensor, uint32_t before = 0);
/// Of the voxels and their spacing.
uint32_t checksum(const Case& of);
uint32_t checksum(const Preprocessing& of, uint32_t before);

}  // namespace segment
