// Checksums (zlib's CRC-32) of cases and of their preprocessing.
#pragma once

#include <cstdint>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"
#include "examples/segment/task.h"

namespace segment {

/// Returns the checksum of data followed by the elements of a CPU tensor in row-major order. `before` is the checksum
/// of these data; 0: no data.
uint32_t checksum(const voxgrad::Tensor& tensor, uint32_t before = 0);
/// Returns the checksum of the image, the label and the spacing of a case.
uint32_t checksum(const Case& c);
/// Returns the checksum of data followed by the parameters of the preprocessing of a plan. `before` is the checksum of
/// these data.
uint32_t checksum(const nnunet::ModelPlan& plan, uint32_t before);

}  // namespace segment
