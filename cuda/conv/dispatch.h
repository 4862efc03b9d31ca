// Convolutions on tensor cores: forward, transposed, weight gradient.
#pragma once

#include <functional>

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

/// out[n][c][...] = bias[c], behind the ReLU if there is one: what no tap reaches.
void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch);

/// The plain kernels, for every problem of f32 and f64.
void simt_fprop_dgrad(const char* op, const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                      const ConvGeometry& geometry, bool transposed, const Launch& launch);
void simt_wgrad(const char* op, const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                const Launch& launch);

/// What a plan has to know of the GPU that the problem goes to.
void describe_device(ConvProblem& problem, const Launch& launch);

/// Packs x of so many samples, the next ones, in place of the weight gradient (of halves), and does with it what else
/// there is to do.
using PackNext = std::function<void(void* packed, int64_t samples)>;

/// The same as the gathers, for the weight gradient: of few channels, or by one instruction or the other.
bool weight_of_few_channels(const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                            const Launch& launch);
bool weight_by_wgmma(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch,
                     const PackNext& pack_x = {});
bool weight_by_mma(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch);

/// y from x and w, and dw from x and dy, of halves by wgmma, for which x is packed once. False likewise.
bool gather_with_weight_gradient(const View& y, const View& dw, const View& x, const View& dy, const View& w,
                                 const ConvGeometry& geometry, const Launch& launch);

}  // namespace voxgrad::cuda
