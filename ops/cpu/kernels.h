// Declarations of the CPU kernels (ops/detail/kernels.def).
#pragma once

#include "ops/detail/kernels.h"

namespace voxgrad::cpu {

#define VG_KERNEL(name, outputs, parameters) void name parameters;
#include "ops/detail/kernels.def"
ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry);

}  // namespace voxgrad::cpu
