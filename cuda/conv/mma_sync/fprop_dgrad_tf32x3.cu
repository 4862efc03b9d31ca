// gather_mma.cuh for float32 tensors to float32 accuracy.
#include "cuda/conv/mma_sync/fprop_dgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_gather_mma<Tf32x3>(const GatherMma& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch_gather_tile<GatherTile<Tf32x3, 1>>(p, stream);
    case 16:
      return launch_gather_tile<GatherTile<Tf32x3, 2>>(p, stream);
    case 24:
      return launch_gather_tile<GatherTile<Tf32x3, 3>>(p, stream);
    case 32:
      return launch_gather_tile<GatherTile<Tf32x3, 4>>(p, stream);
  }
}

}  // namespace voxgrad::cuda
