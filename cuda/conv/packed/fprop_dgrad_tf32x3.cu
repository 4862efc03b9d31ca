// gather_wgmma.cuh in the arithmetic Tf32x3.
#include "cuda/conv/packed/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_wgmma<Tf32x3>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 16:
      return launch_gather_wgmma_tile<Tf32x3, 16>(p, stream);
    case 24:
      return launch_gather_wgmma_tile<Tf32x3, 24>(p, stream);
    case 32:
      return launch_gather_wgmma_tile<Tf32x3, 32>(p, stream);
    case 48:
      return launch_gather_wgmma_tile<Tf32x3, 48>(p, stream);
    case 64:
      return launch_gather_wgmma_tile<Tf32x3, 64>(p, stream);
  }
}

}  // namespace voxgrad::cuda
