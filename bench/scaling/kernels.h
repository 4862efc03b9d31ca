// A kernel that simulates a reduction, and a query of the GPU's name.
#pragma once

#include <string>

#include "core/tensor.h"
#include "cuda/cuda.h"

namespace scaling {

/// Queues a kernel of `blocks` CTAs that multiplies an f32 or bf16 tensor by `factor` and runs for at least
/// `microseconds`. Does not change the last elements of a tensor if they do not fill 16 bytes, and does not change
/// tensors of other dtypes.
void queue_reduction(const voxgrad::Tensor& tensor, float factor, double microseconds, int blocks,
                     const voxgrad::cuda::Stream& stream);
/// Returns the name of a GPU, for example "NVIDIA H100 80GB HBM3".
std::string gpu_name(int device);

}  // namespace scaling
