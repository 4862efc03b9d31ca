#include "nn/data/sampler.h"

#include "core/error.h"
#include "nn/data/seed.h"
#include "ops/create.h"

namespace voxgrad::data {

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  check(size >= 0, "SequentialSampler", "size must not be negative, got ", size);
}

Sampler::Order SequentialSampler::order(int64_t) const {
  return [](int64_t position) { return position; };
}

RandomSampler::RandomSampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  check(size >= 0, "RandomSampler", "size must not be negative, got ", size);
}

Sampler::Order RandomSampler::order(int64_t epoch) const {
  Generator random(derived_seed(seed_, epoch, kOrderStream));
  return [order = randperm(size_, &random)](int64_t position) { return order.data<int64_t>()[position]; };
}

std::string RandomSampler::name() const { return concat("RandomSampler(seed ", seed_, ")"); }

}  // namespace voxgrad::data
