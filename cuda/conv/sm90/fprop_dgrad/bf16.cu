// Instantiates kernel.cuh for BFloat16.
#include "cuda/conv/sm90/fprop_dgrad/tiles.cuh"

namespace voxgrad::cuda::implicit_gemm {

template void launch_kernel<BFloat16, false>(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas,
                                             int shared_bytes, cudaStream_t stream);

}  // namespace voxgrad::cuda::implicit_gemm
