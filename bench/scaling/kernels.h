// What scaling runs on the GPU itself.
#pragma once

#include <string>

#include "core/tensor.h"
#include "cuda/cuda.h"

namespace scaling {

/// Queues a kernel of `blocks` thread blocks that multiplies a tensor, f32 or bf16, by `factor` (others and 1: leaves
/// it), and does not end before `microseconds` are over.
void queue_reduction(const voxgrad::Tensor& tensor, float factor, double microseconds, int blocks,
                     const voxgrad::cuda::Stream& stream);
/// "NVIDIA H100 80GB HBM3"
std::string gpu_name(int device);

}  // namespace scaling
