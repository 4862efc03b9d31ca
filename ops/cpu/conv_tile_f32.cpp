// The register tiles for f32.
#include "ops/cpu/conv_tile_impl.h"

namespace voxgrad::cpu {

template std::vector<ColumnBlock<float>> column_blocks(int64_t channels);

}  // namespace voxgrad::cpu
