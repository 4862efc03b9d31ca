// weight_wgmma.cuh in the arithmetic Tf32.
#include "cuda/conv/packed/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_wgmma<Tf32>(const WeightWgmma& p, int columns, int heights, int64_t blocks, int shared_bytes,
                               cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch_wgmma_heights<Tf32, 8>(p, heights, blocks, shared_bytes, stream);
    case 16:
      return launch_wgmma_heights<Tf32, 16>(p, heights, blocks, shared_bytes, stream);
    case 24:
      return launch_wgmma_heights<Tf32, 24>(p, heights, blocks, shared_bytes, stream);
    case 32:
      return launch_wgmma_heights<Tf32, 32>(p, heights, blocks, shared_bytes, stream);
    case 48:
      return launch_wgmma_heights<Tf32, 48>(p, heights, blocks, shared_bytes, stream);
    case 64:
      return launch_wgmma_heights<Tf32, 64>(p, heights, blocks, shared_bytes, stream);
    case 72:
      return launch_wgmma_heights<Tf32, 72>(p, heights, blocks, shared_bytes, stream);
    case 80:
      return launch_wgmma_heights<Tf32, 80>(p, heights, blocks, shared_bytes, stream);
    case 96:
      return launch_wgmma_heights<Tf32, 96>(p, heights, blocks, shared_bytes, stream);
    case 128:
      return launch_wgmma_heights<Tf32, 128>(p, heights, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
