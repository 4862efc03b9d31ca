// The weight gradient by way of channels-last halves on tensor cores.
#pragma once

#include "cuda/launch.h"
#include "ops/kernels.h"

namespace voxgrad::cuda {

struct WgradTile;
namespace implicit_wgrad {
struct Params;

/// Queues the kernel of the tile that the plan names; kPromotes: of three products.
template <class Element, bool kPromotes>
void launch_kernel(const Params& p, const WgradTile& tile, int ctas, int shared_bytes, cudaStream_t stream);
}  // namespace implicit_wgrad

}  // namespace voxgrad::cuda
