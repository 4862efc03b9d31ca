// Tests of random numbers: Philox against its published test vectors, the distributions, the generator's state, and
// equality between the CPU and the GPU.
#include "core/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/detail/philox.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(Philox, MatchesPublishedVectors) {  // the authors' test vectors for philox4x32-10
  const auto expect = [](Philox4 r, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    EXPECT_EQ(r.v[0], a);
    EXPECT_EQ(r.v[1], b);
    EXPECT_EQ(r.v[2], c);
    EXPECT_EQ(r.v[3], d);
  };
  expect(philox(0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  expect(philox(~0ull, ~0ull, ~0ull), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1);
}

TEST(Random, UniformAndNormalHaveTheRightMoments) {
  manual_seed(1);
  const Tensor u = rand({1 << 18}, {.dtype = f64}), n = randn({1 << 18}, {.dtype = f64});
  EXPECT_NEAR(u.mean().item(), 0.5, 3e-3);
  EXPECT_NEAR(var(u).item(), 1.0 / 12, 1e-3);
  EXPECT_GE(amin(u).item(), 0);
  EXPECT_LT(amax(u).item(), 1);
  EXPECT_NEAR(n.mean().item(), 0, 1e-2);
  EXPECT_NEAR(var(n).item(), 1, 1e-2);
  EXPECT_NEAR(pow(n, 4).mean().item(), 3, 0.1);
  EXPECT_LT(std::abs((n.slice(0, 0, 1 << 18, 2) * n.slice(0, 1, 1 << 18, 2)).mean().item()), 1e-2);
}

TEST(Random, SeedsAndStatesReproduceNumbers) {
  manual_seed(7);
  const Tensor a = rand({101});
  const GeneratorState state = default_generator().state();
  const Tensor b = randn({33});
  const Tensor order = randperm(50);
  default_generator().set_state(state);
  EXPECT_EQ(randn({33}).to_vector(), b.to_vector());
  EXPECT_EQ(randperm(50).to_vector(), order.to_vector());
  manual_seed(7);
  EXPECT_EQ(rand({101}).to_vector(), a.to_vector());
  EXPECT_NE(rand({101}).to_vector(), a.to_vector());
  manual_seed(8);
  EXPECT_NE(rand({101}).to_vector(), a.to_vector());
}

TEST(Random, RandLikeCopiesShapeDtypeDeviceAndLayout) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16})
      for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        const Tensor like = empty({2, 3, 4, 5}, {dtype, device}, format).requires_grad_();
        for (const bool normal : {false, true}) {
          Generator a(3), b(3);
          const Tensor x = normal ? randn_like(like, &a) : rand_like(like, &a);
          const Tensor expected =
              normal ? randn({2, 3, 4, 5}, {dtype, device}, &b) : rand({2, 3, 4, 5}, {dtype, device}, &b);
          EXPECT_EQ(x.to_vector(), expected.to_vector());
          EXPECT_EQ(x.dtype(), dtype);
          EXPECT_EQ(x.device(), device);
          EXPECT_EQ(x.strides(), like.strides());
          EXPECT_FALSE(x.requires_grad());
        }
      }
  EXPECT_ERROR(rand_like(zeros({2}, {.dtype = i64})), "rand_like: needs a floating-point dtype, got i64");
  EXPECT_ERROR(randn_like(Tensor()), "randn_like: the tensor is undefined");
}

TEST(Random, RandpermContainsEveryNumberOnce) {
  std::vector<int64_t> order = randperm(1000).to_vector<int64_t>();
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_EQ(randperm(0).numel(), 0);
  EXPECT_ERROR(randperm(-1), "must not be negative");
}

TEST(Random, GpuDrawsTheSameNumbersAsTheCpu) {
  if (!cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (DType dtype : {f32, f64})
    for (int64_t count : {1, 5, 1023, 100001}) {
      const auto both = [&](auto draw) {
        manual_seed(99);
        const Tensor cpu = draw(Device::cpu());
        manual_seed(99);
        return std::pair(cpu, draw(Device::cuda()).to(Device::cpu()));
      };
      const auto [u_cpu, u_gpu] = both([&](Device d) { return rand({count}, {dtype, d}); });
      EXPECT_EQ(u_cpu.to_vector(), u_gpu.to_vector());
      const auto [n_cpu, n_gpu] = both([&](Device d) { return randn({count}, {dtype, d}); });
      EXPECT_LT(amax(abs(n_cpu - n_gpu)).item(), dtype == f32 ? 1e-5 : 1e-13);
    }
}

}  // namespace
}  // namespace voxgrad
