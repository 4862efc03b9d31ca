// Launch of fprop and dgrad of channels-last tensors on tensor cores.
#pragma once

#include "cuda/conv/plan/sm90_fprop_dgrad.h"
#include "cuda/detail/launch.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

namespace implicit_gemm {
struct Params;

/// Launches the kernel of a tile. `n_major` states that the output channels of the weights are contiguous. kThree
/// selects tf32x3.
template <class Element, bool kThree>
void launch_kernel(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas, int shared_bytes,
                   cudaStream_t stream);
}  // namespace implicit_gemm

}  // namespace voxgrad::cuda
