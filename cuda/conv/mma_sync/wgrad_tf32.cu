// weight_mma.cuh in the arithmetic Tf32.
#include "cuda/conv/mma_sync/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_mma<Tf32>(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  switch (rows) {
    case 16:
      return launch_weight_tile<WeightTile<Tf32, 1, weight_columns<Tf32>(16) / 4>>(p, blocks, shared_bytes, stream);
    case 32:
      return launch_weight_tile<WeightTile<Tf32, 2, weight_columns<Tf32>(32) / 4>>(p, blocks, shared_bytes, stream);
    case 48:
      return launch_weight_tile<WeightTile<Tf32, 3, weight_columns<Tf32>(48) / 4>>(p, blocks, shared_bytes, stream);
    case 64:
      return launch_weight_tile<WeightTile<Tf32, 4, weight_columns<Tf32>(64) / 4>>(p, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
