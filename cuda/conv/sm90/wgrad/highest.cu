// Instantiates kernel.cuh for three products of Float16.
#include "cuda/conv/sm90/wgrad/tiles.cuh"

namespace voxgrad::cuda::implicit_wgrad {

template void launch_kernel<Float16, true>(const Params& p, const WgradTile& tile, int ctas, int cluster,
                                           int shared_bytes, cudaStream_t stream);

}  // namespace voxgrad::cuda::implicit_wgrad
