// gather_wgmma.cuh in the arithmetic F16.
#include "cuda/conv/packed/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_wgmma<F16>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 16:
      return launch_gather_wgmma_tile<F16, 16>(p, stream);
    case 24:
      return launch_gather_wgmma_tile<F16, 24>(p, stream);
    case 32:
      return launch_gather_wgmma_tile<F16, 32>(p, stream);
    case 48:
      return launch_gather_wgmma_tile<F16, 48>(p, stream);
    case 64:
      return launch_gather_wgmma_tile<F16, 64>(p, stream);
    case 128:
      return launch_gather_wgmma_tile<F16, 128>(p, stream);
  }
}

}  // namespace voxgrad::cuda
