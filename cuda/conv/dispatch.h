// The kernel families, in the order in which they are asked (conv.cu, weight.cu), and what their host sides share.
#pragma once

#include <functional>

#include "cuda/conv/plan.h"
#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// False, and nothing done, if the problem has to go to the plain kernel.
bool implicit_gemm_fprop_dgrad(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                               const ConvGeometry& geometry, ConvPass pass, const Launch& launch);

/// The same for few channels.
bool small_channel_fprop_dgrad(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                               const ConvGeometry& geometry, ConvPass pass, const Launch& launch);

/// Packs x of so many samples, the next ones, in place of the weight gradient (of halves), and does with it what else
/// there is to do.
using PackNext = std::function<void(void* packed, int64_t samples)>;

/// The same for wgrad.
bool small_channel_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                         const Launch& launch);
bool packed_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch,
                  const PackNext& pack_x = {});
bool mma_sync_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch);

/// y from x and w, and dw from x and dy, of halves by wgmma, for which x is packed once. False likewise.
bool packed_fprop_and_wgrad(const View& y, const View& dw, const View& x, const View& dy, const View& w,
                            const ConvGeometry& geometry, const Launch& launch);

/// The plain kernels, for every problem of f32 and f64.
void simt_fprop_dgrad(const char* op, const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                      const ConvGeometry& geometry, ConvPass pass, const Launch& launch);
void simt_wgrad(const char* op, const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                const Launch& launch);

/// out[n][c][...] = bias[c], behind the ReLU if there is one: what no tap reaches.
void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch);

/// What a plan has to know of the GPU that the problem goes to.
void describe_device(ConvProblem& problem, const Launch& launch);

}  // namespace voxgrad::cuda
