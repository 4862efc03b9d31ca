// weight_mma.cuh in the arithmetic F16.
#include "cuda/conv/mma_sync/wgrad.cuh"

namespace voxgrad::cuda {

template <>
void launch_weight_mma<F16>(const WeightMma& p, int rows, int64_t blocks, int shared_bytes, cudaStream_t stream) {
  switch (rows) {
    case 16:
      return launch_weight_tile<WeightTile<F16, 1, weight_columns<F16>(16) / 4>>(p, blocks, shared_bytes, stream);
    case 32:
      return launch_weight_tile<WeightTile<F16, 2, weight_columns<F16>(32) / 4>>(p, blocks, shared_bytes, stream);
    case 48:
      return launch_weight_tile<WeightTile<F16, 3, weight_columns<F16>(48) / 4>>(p, blocks, shared_bytes, stream);
    case 64:
      return launch_weight_tile<WeightTile<F16, 4, weight_columns<F16>(64) / 4>>(p, blocks, shared_bytes, stream);
  }
}

}  // namespace voxgrad::cuda
