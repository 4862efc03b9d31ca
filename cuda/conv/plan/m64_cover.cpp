// Finds the cover with the fewest m64 tiles.
#include "cuda/conv/plan/m64_cover.h"

#include "core/detail/divide.h"

namespace voxgrad::cuda {
namespace {

/// Divides the box into regions: the whole box (level 0), samples (1) or planes (2). Divides each region into m64 tiles
/// of consecutive rows or, with `octets`, of 8 lines with 8 neighbors each. Returns nothing if the number of tiles
/// exceeds `most`.
std::optional<M64Cover> cover(const int (&tile)[4], const int (&box)[4], int level, bool octets, int most) {
  const int line = box[3], plane = line * box[2], volume = plane * box[1];
  const int regions = level == 0 ? 1 : level == 1 ? tile[0] : tile[0] * tile[1];
  int lines = tile[2];  // lines of a region, from the first to the last line with results
  if (level < 2) lines += (tile[1] - 1) * box[2];
  if (level < 1) lines += (tile[0] - 1) * box[1] * box[2];
  const int pieces = octets ? divide_up(lines, 8) * (tile[3] / 8) : divide_up((lines - 1) * line + tile[3], 64);
  if (regions * pieces > most) return std::nullopt;
  M64Cover found{octets ? line : 8, regions * pieces, {}};
  found.base.fill(-1);
  for (int r = 0, i = 0; r < regions; ++r)
    for (int piece = 0; piece < pieces; ++piece) {
      const int region = level == 0 ? 0 : level == 1 ? r * volume : r / tile[1] * volume + r % tile[1] * plane;
      const int blocks = tile[3] / 8;
      found.base[static_cast<size_t>(i++)] =
          region + (octets ? piece / blocks * 8 * line + piece % blocks * 8 : piece * 64);
    }
  return found;
}

}  // namespace

std::optional<M64Cover> best_cover(const int (&tile)[4], const int (&box)[4], int most) {
  std::optional<M64Cover> best;
  for (const bool octets : {false, true})
    for (int level = 0; level < 3; ++level)
      if (!octets || tile[3] % 8 == 0)
        if (const auto found = cover(tile, box, level, octets, most)) {
          best = found;
          most = found->tiles - 1;
        }
  return best;
}

}  // namespace voxgrad::cuda
