// How the m64 tiles of fprop_dgrad cover the results of a CTA tile in its box of inputs.
#pragma once

#include <array>
#include <optional>

#include "cuda/conv/plan/sm90_fprop_dgrad.h"

namespace voxgrad::cuda {

/// m64 tiles that cover the results of a CTA tile in its box of inputs.
struct M64Cover {
  int pitch;                                  ///< rows of the box from one group of 8 rows of an m64 tile to the next
  int tiles;                                  ///< number of m64 tiles
  std::array<int, kMaxFpropDgradTiles> base;  ///< first row of each m64 tile, or -1
};

/// Returns the cover of a CTA tile (sample, depth, height, width) with the fewest m64 tiles. `box` has the sizes of the
/// box of inputs. Returns nothing if the number of tiles exceeds `most`.
std::optional<M64Cover> best_cover(const int (&tile)[4], const int (&box)[4], int most);

}  // namespace voxgrad::cuda
