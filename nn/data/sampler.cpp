#include "nn/data/sampler.h"

#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/random.h"
#include "nn/data/seed.h"

namespace voxgrad::data {

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  check(size >= 0, "SequentialSampler", "size must not be negative, got ", size);
}

std::vector<int64_t> SequentialSampler::order(int64_t) const {
  std::vector<int64_t> indices(static_cast<size_t>(size_));
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return indices;
}

RandomSampler::RandomSampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  check(size >= 0, "RandomSampler", "size must not be negative, got ", size);
}

std::vector<int64_t> RandomSampler::order(int64_t epoch) const {
  std::vector<int64_t> indices = SequentialSampler(size_).order(epoch);
  Generator random(derived_seed(seed_, epoch, kOrderStream));
  for (size_t i = indices.size(); i > 1; --i)  // Fisher and Yates
    std::swap(indices[i - 1], indices[static_cast<size_t>(random.next_below(static_cast<int64_t>(i)))]);
  return indices;
}

}  // namespace voxgrad::data
