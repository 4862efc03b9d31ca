// weight_wgmma.cuh in the arithmetic Bf16.
#include "cuda/conv/packed/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_wgmma<Bf16>(const WeightWgmma& p, int columns, int heights, int64_t blocks, int shared_bytes,
                               cudaStream_t stream) {
  switch (columns) {
    case 8:
      return launch_wgmma_heights<Bf16, 8>(p, heights, blocks, shared_bytes, stream);
    case 16:
      return launch_wgmma_heights<Bf16, 16>(p, heights, blocks, shared_bytes, stream);
    case 24:
      return launch_wgmma_heights<Bf16, 24>(p, heights, blocks, shared_bytes, stream);
    case 32:
      return launch_wgmma_heights<Bf16, 32>(p, heights, blocks, shared_bytes, stream);
    case 48:
      return launch_wgmma_heights<Bf16, 48>(p, heights, blocks, shared_bytes, stream);
    case 64:
      return launch_wgmma_heights<Bf16, 64>(p, heights, blocks, shared_bytes, stream);
    case 72:
      return launch_wgmma_heights<Bf16, 72>(p, heights, blocks, shared_bytes, stream);
    case 80:
      return launch_wgmma_heights<Bf16, 80>(p, heights, blocks, shared_bytes, stream);
    case 96:
      return launch_wgmma_heights<Bf16, 96>(p, heights, blocks, shared_bytes, stream);
    case 128:
      return launch_wgmma_heights<Bf16, 128>(p, heights, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
