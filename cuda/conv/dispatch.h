// The kernel families, in the order in which they are asked (conv.cu, weight.cu), and what their host sides share.
#pragma once

#include "cuda/conv/plan.h"
#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

/// False, and nothing done, if the problem has to go to the next.
bool small_channel_fprop_dgrad(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                               const ConvGeometry& geometry, ConvPass pass, const Launch& launch);
bool mma_sync_fprop_dgrad(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                          const ConvGeometry& geometry, ConvPass pass, const Launch& launch);

/// The same for wgrad.
bool small_channel_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                         const Launch& launch);
bool mma_sync_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch);

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
