// Convolutions of channels-last tensors, or channels-last copies, on tensor cores: fprop and dgrad.
#pragma once

#include "cuda/conv/fprop_dgrad/plan.h"
#include "cuda/detail/launch.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

namespace implicit_gemm {
struct Params;

/// Queues the kernel of the tile that the plan names. `n_major`: the weights' output channels are contiguous. kThree:
/// three products, of floats.
template <class Element, bool kThree>
void launch_kernel(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas, int shared_bytes,
                   cudaStream_t stream);
}  // namespace implicit_gemm

}  // namespace voxgrad::cuda
