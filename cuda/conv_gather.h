// Forward and transposed convolution on tensor cores.
#pragma once

#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// False, and nothing done, if the problem has to go to the plain kernel. `bias` may be null.
bool gather_on_tensor_cores(const View& out, const View& in, const View& w, const View* bias,
                            const ConvGeometry& geometry, bool transposed, const Launch& launch);

}  // namespace voxgrad::cuda
