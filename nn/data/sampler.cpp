// Implements the samplers.
#include "nn/data/sampler.h"

#include "core/detail/philox.h"
#include "ops/create.h"

namespace voxgrad::data {
namespace {

constexpr int64_t kOrderStream = -1;  // the seed of an epoch's order has this index, which no sample has

}  // namespace

Sampler::Order RandomSampler::order(int64_t epoch) const {
  Generator random(derived_seed(seed_, epoch, kOrderStream));
  return [order = randperm(size_, &random)](int64_t position) { return order.data<int64_t>()[position]; };
}

DistributedSampler::DistributedSampler(std::shared_ptr<const Sampler> sampler, const DistributedSamplerOptions& options)
    : sampler_(std::move(sampler)), options_(options) {
  constexpr const char* kOp = "DistributedSampler";
  check(sampler_ && sampler_->num_replicas() == 1, kOp, "needs a sampler that is not distributed, got ",
        sampler_ ? sampler_->name() : "nullptr");
  check(options.num_replicas > 0 && options.rank >= 0 && options.rank < options.num_replicas, kOp,
        "rank must lie in [0, ", options.num_replicas, "), got ", options.rank);
  check(options.batch_size > 0 && options.batch_size % options.num_replicas == 0, kOp, "batch_size ",
        options.batch_size, " is not a positive multiple of num_replicas ", options.num_replicas);
  check(sampler_->size() <= INT64_MAX - options.batch_size, kOp, "the last batch of ", sampler_->size(),
        " samples cannot be filled to batch_size ", options.batch_size, ", because the count would exceed 2^63 - 1");
}

Sampler::Order DistributedSampler::order(int64_t epoch) const {
  const int64_t local = local_batch(), batch = options_.batch_size, start = options_.rank * local;
  return [=, all = sampler_->order(epoch), count = sampler_->size()](int64_t position) {
    return all((position / local * batch + start + position % local) % count);
  };
}

}  // namespace voxgrad::data
