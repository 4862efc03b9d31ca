// Checksums (zlib's CRC-32) of cases and of their preprocessing.
#pragma once

#include <cstdint>

#include <voxgrad.h>

#include "examples/nnunet/model_folder.h"
#include "examples/segment/task.h"

namespace segment {

/// Extends the checksum `before` of earlier data by the elements of a CPU tensor in row-major order, and returns the
/// new checksum. A checksum starts with `before` = 0.
uint32_t checksum(const voxgrad::Tensor& tensor, uint32_t before = 0);
/// Returns the checksum of the image, the label and the spacing of a case.
uint32_t checksum(const Case& c);
/// Extends the checksum `before` of earlier data by everything in a plan that prepare_for_training() reads, and returns
/// the new checksum.
uint32_t checksum(const nnunet::ModelPlan& plan, uint32_t before);

}  // namespace segment
