// Declarations of the CUDA kernels (ops/detail/kernels.def).
#pragma once

#include "ops/detail/kernels.h"

namespace voxgrad::cuda::kernel {

#define VG_KERNEL(name, outputs, parameters) void name parameters;
#include "ops/detail/kernels.def"
ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry);

}  // namespace voxgrad::cuda::kernel
