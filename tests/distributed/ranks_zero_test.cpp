// Tests of nn::ZeroRedundancy on one or more ranks.
#include <optional>

#include "core/random.h"
#include "nn/distributed/data_parallel.h"
#include "nn/distributed/zero.h"
#include "nn/optim/clip.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/shape.h"
#include "tests/distributed/ranks.h"
#include "tests/distributed/ranks_model.h"

namespace voxgrad {
namespace {

/// Expects that both maps have the same names and bitwise equal tensors.
void expect_equal(const TensorMap& a, const TensorMap& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_EQ(tensor.to_vector(), b.at(name).to_vector()) << name;
  }
}

TEST_F(Ranks, ZeroRedundancyIsBitwiseEqualToOneOptimizer) {
  constexpr optim::AdamWOptions kOptions{.lr = 0.01};
  const auto make_input = [&](uint64_t seed) {
    Generator random(seed);
    return randn({kBatch, 6}, {}, &random).narrow(0, rank_ * kBatch / size_, kBatch / size_);
  };
  Model plain, sharded, later;
  sharded.load_state_dict(plain.state_dict());
  const nn::DataParallel plain_parallel(plain, *world_), sharded_parallel(sharded, *world_),
      later_parallel(later, *world_);
  sharded.load_state_dict(plain.state_dict());
  optim::AdamW whole(plain.parameters(), kOptions), part(sharded.parameters(), kOptions);
  nn::ZeroRedundancy zero(part, *world_);
  const auto step = [&](Model& model, optim::Optimizer& optimizer, uint64_t seed) {
    optimizer.zero_grad();
    loss_of(model, make_input(seed), seed % 2).backward();  // `spare` has a gradient in every other step
    optim::clip_grad_norm_(model.parameters(), 0.1);
    optimizer.step();
  };
  for (uint64_t seed = 0; seed < 5; ++seed) {
    step(plain, whole, seed);
    step(sharded, part, seed);
    expect_equal(sharded.state_dict(), plain.state_dict());
  }
  if (size_ > 1) {
    EXPECT_THROW(part.state_dict(), Error);
  }

  const int to = size_ - 1;
  zero.consolidate_state_dict(to);
  TensorMap state = whole.state_dict();  // equal on all ranks
  if (rank_ == to)
    expect_equal(part.state_dict(), state);
  else
    EXPECT_THROW(part.state_dict(), Error);
  step(plain, whole, 7);
  step(sharded, part, 7);  // each rank continues with its part of the state

  later.load_state_dict(plain.state_dict());
  optim::AdamW loaded(later.parameters(), kOptions);
  {
    const nn::ZeroRedundancy other(loaded, *world_);
    loaded.load_state_dict(whole.state_dict());
    for (uint64_t seed = 8; seed < 10; ++seed) {
      step(plain, whole, seed);
      step(sharded, part, seed);
      step(later, loaded, seed);
    }
    expect_equal(sharded.state_dict(), plain.state_dict());
    expect_equal(later.state_dict(), plain.state_dict());
    for (const int owner : other.owners()) EXPECT_LT(owner, size_);
    EXPECT_THROW(nn::ZeroRedundancy(loaded, *world_), Error);  // `loaded` is already sharded
    EXPECT_THROW(nn::ZeroRedundancy(whole, *world_), Error);   // `whole` already has state
    EXPECT_THROW(zero.consolidate_state_dict(size_), Error);
  }
  EXPECT_THROW(loaded.step(), Error);
}

TEST_F(Ranks, ZeroRedundancyAllocatesOnlyItsPartOfTheState) {
  const auto bytes_of_first_step = [&](bool sharded) {
    const Device device = world_->device();
    Tensors params;
    for (int i = 0; i < 8; ++i) {
      params.push_back(ones({1000}, {.device = device}).requires_grad_());
      params.back().set_grad(ones({1000}, {.device = device}));
    }
    optim::AdamW optimizer(params);
    std::optional<nn::ZeroRedundancy> zero;
    if (sharded) zero.emplace(optimizer, *world_);
    memory::reset_peak(device);
    const int64_t before = memory::stats(device).current;
    optimizer.step();
    return memory::stats(device).peak - before;
  };
  const auto all = static_cast<double>(bytes_of_first_step(false)),
             own = static_cast<double>(bytes_of_first_step(true));
  if (size_ > 1) {
    EXPECT_LT(own, 0.8 * all);  // the rank's part of the state, and a message buffer of the same size
  }
}

}  // namespace
}  // namespace voxgrad
