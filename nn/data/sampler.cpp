#include "nn/data/sampler.h"

#include <numeric>

#include "core/error.h"
#include "nn/data/seed.h"
#include "ops/create.h"

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
  Generator random(derived_seed(seed_, epoch, kOrderStream));
  return randperm(size_, &random).to_vector<int64_t>();
}

}  // namespace voxgrad::data
