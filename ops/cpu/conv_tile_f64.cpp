// The register tiles for f64.
#include "ops/cpu/conv_tile_impl.h"

namespace voxgrad::cpu {

template std::vector<ColumnBlock<double>> column_blocks(int64_t channels);

}  // namespace voxgrad::cpu
