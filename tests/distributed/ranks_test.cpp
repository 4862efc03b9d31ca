// Tests of collectives on one or more ranks.
#include "tests/distributed/ranks.h"
#include "core/random.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"

namespace voxgrad {
namespace {

[[maybe_unused]] const auto* const ranks_environment = testing::AddGlobalTestEnvironment(new RanksEnvironment);

TEST_F(Ranks, AllReduceAndAllGatherGiveExpectedValues) {
  const double sum = size_ * (size_ + 1) / 2.0;
  for (const DType dtype : {f32, f64, bf16, f16, i64}) {
    const Tensor own = full({3, 2}, rank_ + 1, {.dtype = dtype});
    const Tensor total = own.clone();
    world_->all_reduce(total);
    EXPECT_EQ(total.to_vector(), std::vector<double>(6, sum)) << dtype;
    const Tensor high = own.clone(), low = own.clone();
    world_->all_reduce(high, ReduceOp::max);
    world_->all_reduce(low, ReduceOp::min);
    EXPECT_EQ(high.to_vector(), std::vector<double>(6, size_)) << dtype;
    EXPECT_EQ(low.to_vector(), std::vector<double>(6, 1)) << dtype;

    const Tensor all = world_->all_gather(own);
    EXPECT_EQ(all.shape(), (Shape{size_, 3, 2}));
    EXPECT_EQ(all.dtype(), dtype);
    for (int other = 0; other < size_; ++other)
      EXPECT_EQ(all[other].to_vector(), std::vector<double>(6, other + 1)) << dtype;
  }
  world_->barrier();
}

TEST_F(Ranks, BroadcastAcceptsAnyDtypeAndLayout) {
  for (const DType dtype : {f32, f64, bf16, f16, i64, i32, u8, b8})
    for (int root = 0; root < size_; ++root) {
      const Tensor values = full({2, 3}, rank_ == root, {.dtype = dtype}).transpose(0, 1);
      world_->broadcast(values, root);
      EXPECT_EQ(values.to_vector(), std::vector<double>(6, 1)) << dtype;
    }
  const Tensor strided = arange(0, 12).reshape({3, 4}).transpose(0, 1).slice(0, 0, 4, 2);
  const std::vector<double> before = strided.to_vector();
  world_->all_reduce(strided);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(strided.to_vector()[i], before[i] * size_);
}

TEST_F(Ranks, SumsAreBitwiseReproducibleAndEqualOnAllRanks) {
  for (const DType dtype : {f32, bf16})
    for (const int64_t count : {7, 1000, 300000}) {
      Generator random(static_cast<uint64_t>(rank_));
      const Tensor own = randn({count}, {}, &random).to(dtype);
      const Tensor once = own.clone(), twice = own.clone();
      world_->all_reduce(once);
      world_->all_reduce(twice);
      expect_same_everywhere(once);
      EXPECT_EQ(once.to_vector(), twice.to_vector()) << dtype << ' ' << count;
    }
}

TEST_F(Ranks, MpiRejectsInvalidCalls) {
  if (world_->device().is_cuda()) GTEST_SKIP() << "NCCL accepts some of these calls";
  EXPECT_ERROR(world_->all_reduce(zeros({2}, {.dtype = i32})),
               "all_reduce: reductions support f32, f64, bf16, f16 and i64");
  EXPECT_ERROR(world_->all_reduce(zeros({2}), ReduceOp::mean),
               "all_reduce: reductions over ranks support sum, max and min, not mean");
  EXPECT_ERROR(world_->broadcast(Tensor()), "broadcast: the tensor is undefined");
  EXPECT_ERROR(world_->all_reduce(Tensor()), "all_reduce: the tensor is undefined");
  EXPECT_ERROR(world_->broadcast(zeros({2}), size_), "broadcast: root must be a rank in [0, ");
  EXPECT_ERROR(world_->all_reduce_async(zeros({2, 3}).transpose(0, 1)), "not contiguous");
  EXPECT_ERROR(world_->all_reduce(zeros({2}, {.requires_grad = true})), "an in-place write is not recorded");
  EXPECT_ERROR(world_->set_timeout(0), "the time must be positive");
}

}  // namespace
}  // namespace voxgrad
