// Seeds that are derived from a loader's seed: one for the order of each epoch, and one for each sample of each epoch.
#pragma once

#include <cstdint>

#include "../../../core/detail/philox.h"

namespace voxgrad::data {

/// The index from which the seed of an epoch's order is derived. No sample has this index.
inline constexpr int64_t kOrderStream = -1;

/// Hashes (seed, epoch, index) with Philox.
inline uint64_t derived_seed(uint64_t seed, int64_t epoch, int64_t index) {
  const Philox4 r = philox(seed, static_cast<uint64_t>(index), static_cast<uint64_t>(epoch));
  return static_cast<uint64_t>(r.v[0]) << 32 | r.v[1];
}

}  // namespace voxgrad::data
