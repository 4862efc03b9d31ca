// weight_mma.cuh in the arithmetic Tf32x3.
#include "cuda/conv/mma_sync/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_mma<Tf32x3>(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  switch (rows) {
    case 16:
      return launch_weight_tile<WeightTile<Tf32x3, 1, weight_columns<Tf32x3>(16) / 4>>(p, blocks, shared_bytes, stream);
    case 32:
      return launch_weight_tile<WeightTile<Tf32x3, 2, weight_columns<Tf32x3>(32) / 4>>(p, blocks, shared_bytes, stream);
    case 48:
      return launch_weight_tile<WeightTile<Tf32x3, 3, weight_columns<Tf32x3>(48) / 4>>(p, blocks, shared_bytes, stream);
    case 64:
      return launch_weight_tile<WeightTile<Tf32x3, 4, weight_columns<Tf32x3>(64) / 4>>(p, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
