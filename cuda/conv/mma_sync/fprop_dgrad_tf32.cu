// gather_mma.cuh for float32 tensors in TF32.
#include "cuda/conv/mma_sync/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_mma<Tf32>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch_gather_tile<GatherTile<Tf32, 1>>(p, stream);
    case 16:
      return launch_gather_tile<GatherTile<Tf32, 2>>(p, stream);
    case 24:
      return launch_gather_tile<GatherTile<Tf32, 3>>(p, stream);
    case 32:
      return launch_gather_tile<GatherTile<Tf32, 4>>(p, stream);
    case 48:
      return launch_gather_tile<GatherTile<Tf32, 6>>(p, stream);
    case 64:
      return launch_gather_tile<GatherTile<Tf32, 8>>(p, stream);
  }
}

}  // namespace voxgrad::cuda
