// gather_wgmma.cuh in the arithmetic Tf32.
#include "cuda/conv/packed/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_wgmma<Tf32>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 16:
      return launch_gather_wgmma_tile<Tf32, 16>(p, stream);
    case 24:
      return launch_gather_wgmma_tile<Tf32, 24>(p, stream);
    case 32:
      return launch_gather_wgmma_tile<Tf32, 32>(p, stream);
    case 48:
      return launch_gather_wgmma_tile<Tf32, 48>(p, stream);
    case 64:
      return launch_gather_wgmma_tile<Tf32, 64>(p, stream);
    case 128:
      return launch_gather_wgmma_tile<Tf32, 128>(p, stream);
  }
}

}  // namespace voxgrad::cuda
