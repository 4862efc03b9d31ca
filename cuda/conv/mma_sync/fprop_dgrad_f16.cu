// gather_mma.cuh for f16 tensors.
#include "cuda/conv/mma_sync/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_mma<F16>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch_gather_tile<GatherTile<F16, 1>>(p, stream);
    case 16:
      return launch_gather_tile<GatherTile<F16, 2>>(p, stream);
    case 24:
      return launch_gather_tile<GatherTile<F16, 3>>(p, stream);
    case 32:
      return launch_gather_tile<GatherTile<F16, 4>>(p, stream);
    case 48:
      return launch_gather_tile<GatherTile<F16, 6>>(p, stream);
    case 64:
      return launch_gather_tile<GatherTile<F16, 8>>(p, stream);
  }
}

}  // namespace voxgrad::cuda
