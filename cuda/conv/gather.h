// Convolutions on tensor cores: forward, transposed, weight gradient.
#pragma once

#include "cuda/conv/plan.h"
#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// False, and nothing done, if the problem has to go to the plain kernel.
bool gather_on_tensor_cores(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                            const ConvGeometry& geometry, bool transposed, const Launch& launch);

/// The same for few channels.
bool gather_few_channels(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                         const ConvGeometry& geometry, bool transposed, const Launch& launch);

/// What a plan has to know of the GPU that the problem goes to.
void describe_device(ConvProblem& problem, const Launch& launch);

/// The same as the gathers, for the weight gradient: of few channels, or by one instruction or the other.
bool weight_of_few_channels(const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                            const Launch& launch);
bool weight_by_wgmma(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch);
bool weight_by_mma(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch);

}  // namespace voxgrad::cuda
