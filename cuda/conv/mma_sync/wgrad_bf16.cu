// weight_mma.cuh in the arithmetic Bf16.
#include "cuda/conv/mma_sync/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_mma<Bf16>(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  switch (rows) {
    case 16:
      return launch_weight_tile<WeightTile<Bf16, 1, weight_columns<Bf16>(16) / 4>>(p, blocks, shared_bytes, stream);
    case 32:
      return launch_weight_tile<WeightTile<Bf16, 2, weight_columns<Bf16>(32) / 4>>(p, blocks, shared_bytes, stream);
    case 48:
      return launch_weight_tile<WeightTile<Bf16, 3, weight_columns<Bf16>(48) / 4>>(p, blocks, shared_bytes, stream);
    case 64:
      return launch_weight_tile<WeightTile<Bf16, 4, weight_columns<Bf16>(64) / 4>>(p, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
