// Declarations of the CUDA kernels (ops/detail/kernels.def).
#pragma once

#include "ops/detail/kernels.h"

namespace voxgrad::cuda::kernel {

#define VG_KERNEL(name, outputs, parameters) void name parameters;
#include "ops/detail/kernels.def"

}  // namespace voxgrad::cuda::kernel
