// Declarations of the CPU kernels (ops/detail/kernels.def).
#pragma once

#include "ops/detail/kernels.h"

namespace voxgrad::cpu {

#define VG_KERNEL(name, outputs, parameters) void name parameters;
#include "ops/detail/kernels.def"

}  // namespace voxgrad::cpu
