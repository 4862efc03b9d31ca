// weight_wgmma.cuh in the arithmetic Bf16.
#include "cuda/conv/weight_wgmma.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_wgmma<Bf16>(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  switch (rows) {
    case 8:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 1>>(p, blocks, shared_bytes, stream);
    case 16:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 2>>(p, blocks, shared_bytes, stream);
    case 24:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 3>>(p, blocks, shared_bytes, stream);
    case 32:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 4>>(p, blocks, shared_bytes, stream);
    case 48:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 6>>(p, blocks, shared_bytes, stream);
    case 64:
      return launch_wgmma_tile<WeightWgmmaTile<Bf16, 8>>(p, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
