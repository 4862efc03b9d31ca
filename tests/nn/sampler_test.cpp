// Tests of samplers: the order of the samples, the samples of each rank, and the check of a loader's state for a
// different order.
#include <set>

#include "nn/data/loader.h"
#include "ops/create.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using data::Loader;

/// Returns the sample indices of an epoch in the order of the sampler.
std::vector<int64_t> visited(const data::Sampler& sampler, int64_t epoch) {
  const data::Sampler::Order order = sampler.order(epoch);
  std::vector<int64_t> indices;
  for (int64_t position = 0; position < sampler.size(); ++position) indices.push_back(order(position));
  return indices;
}

/// Returns the sample indices of step `step` on all ranks, in rank order.
std::vector<int64_t> samples_of_step(std::shared_ptr<const data::Sampler> all, int ranks, int64_t step, bool drop) {
  std::vector<int64_t> samples;
  for (int rank = 0; rank < ranks; ++rank) {
    const data::DistributedSampler part(all, {.num_replicas = ranks, .rank = rank, .batch_size = 8, .drop_last = drop});
    EXPECT_EQ(part.size() * ranks, drop ? 16 : 24);
    const data::Sampler::Order order = part.order(2);
    for (int64_t i = 0; i < 8 / ranks; ++i) samples.push_back(order(step * 8 / ranks + i));
  }
  return samples;
}

TEST(Sampler, RanksSplitTheSamplesOfEachStep) {
  const auto all = std::make_shared<data::RandomSampler>(19, 5);
  const std::vector<int64_t> order = visited(*all, 2);
  for (const bool drop : {false, true})
    for (const int ranks : {1, 2, 4, 8})
      for (int64_t step = 0; step < (drop ? 2 : 3); ++step) {
        std::vector<int64_t> expected;
        for (int64_t i = 0; i < 8; ++i) expected.push_back(order[static_cast<size_t>((step * 8 + i) % 19)]);
        EXPECT_EQ(samples_of_step(all, ranks, step, drop), expected) << ranks << " ranks, step " << step;
      }
  EXPECT_ERROR(data::DistributedSampler(all, {.num_replicas = 2, .rank = 2, .batch_size = 8}),
               "rank must lie in [0, 2), got 2");
  EXPECT_ERROR(data::DistributedSampler(all, {.num_replicas = 3, .batch_size = 8}),
               "batch_size 8 is not a positive multiple of num_replicas 3");
  EXPECT_ERROR(data::DistributedSampler(nullptr, {}), "needs a sampler that is not distributed, got nullptr");
}

TEST(Sampler, OrderDependsOnlyOnSeedAndEpoch) {
  const data::RandomSampler a(50, 1), b(50, 1), other(50, 2);
  const std::vector<int64_t> order = visited(a, 3);
  EXPECT_EQ(order, visited(b, 3));
  EXPECT_NE(order, visited(a, 4));
  EXPECT_NE(order, visited(other, 3));
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 50u);
  EXPECT_EQ(visited(data::SequentialSampler(3), 7), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(visited(data::RandomSampler(8, 3), 1),
            (std::vector<int64_t>{5, 7, 4, 3, 1, 6, 0, 2}));  // fixed, because checkpoints depend on this order
  EXPECT_ERROR(data::RandomSampler(-1), "RandomSampler: size must not be negative");
}

TEST(Sampler, PermutationsAreUniform) {
  std::vector<int> counts(6);
  for (int64_t epoch = 0; epoch < 6000; ++epoch) {
    const std::vector<int64_t> p = visited(data::RandomSampler(3, 9), epoch);
    ++counts[static_cast<size_t>(p[0] * 2 + (p[1] > p[2]))];
  }
  for (int count : counts) EXPECT_NEAR(count, 1000, 5 * 29);  // five standard deviations
}

TEST(DistributedSampler, RejectsSizesWhoseLastBatchWouldOverflow) {
  const auto all = std::make_shared<data::SequentialSampler>(INT64_MAX - 3);
  EXPECT_ERROR(data::DistributedSampler(all, {.num_replicas = 2, .batch_size = 4}),
               "DistributedSampler: the last batch of 9223372036854775804 samples cannot be filled to batch_size 4");
  const data::DistributedSampler largest(std::make_shared<data::SequentialSampler>(INT64_MAX - 4),
                                         {.num_replicas = 2, .rank = 1, .batch_size = 4});
  EXPECT_EQ(largest.order(0)(largest.size() - 2), INT64_MAX - 5);
}

/// Visits every second sample.
class EvenSampler : public data::Sampler {
 public:
  explicit EvenSampler(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  Order order(int64_t) const override {
    return [](int64_t position) { return 2 * position; };
  }
  std::string name() const override { return "EvenSampler"; }

 private:
  int64_t size_;
};

TEST(Loader, RejectsAStateOfADifferentOrder) {
  const data::TensorDataset dataset(arange(0, 10));
  const auto even = std::make_shared<EvenSampler>(5);
  Loader shuffled(dataset, {.shuffle = true}), sequential(dataset), dropping(dataset, {.drop_last = true}),
      own(dataset, {.sampler = even}),
      reseeded(dataset, {.sampler = std::make_shared<data::RandomSampler>(10, /*seed=*/3)});
  const TensorMap state = shuffled.state_dict();
  EXPECT_ERROR(sequential.load_state_dict(state),
               "data::Loader: the state is a position in the order of RandomSampler(seed 0), but this loader uses "
               "SequentialSampler");
  EXPECT_ERROR(reseeded.check_state_dict(state), "but this loader uses RandomSampler(seed 3)");
  EXPECT_ERROR(sequential.check_state_dict(dropping.state_dict()),
               "data::Loader: the state has drop_last true, but this loader has false");
  own.begin();
  Loader resumed(dataset, {.sampler = even});
  resumed.load_state_dict(own.state_dict());
  EXPECT_EQ(resumed.begin()->input.item(), 2);

  TensorMap nameless = state;
  nameless["sampler"] = zeros({2});
  EXPECT_ERROR(shuffled.load_state_dict(nameless), "data::Loader: the state does not contain the name of a sampler");
}

}  // namespace
}  // namespace voxgrad
