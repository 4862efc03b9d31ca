// Tensors: geometry, element access, conversion, printing, and what is refused.
#include "core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(Dims, ShapesAndBroadcasting) {
  EXPECT_EQ(numel({2, 3, 4}), 24);
  EXPECT_EQ(numel({}), 1);
  EXPECT_EQ(numel({5, 0, INT64_MAX, INT64_MAX}), 0);
  EXPECT_ERROR(numel({INT64_MAX, 2}), "does not fit in 64 bits");
  EXPECT_ERROR(numel({2, -1}), "must not be negative");
  EXPECT_ERROR((Dims{1, 2, 3, 4, 5, 6, 7, 8, 9}), "at most 8 axes");
  EXPECT_EQ(broadcast_shapes({4, 1, 3}, {2, 1}, "t"), (Shape{4, 2, 3}));
  EXPECT_EQ(empty({0, int64_t{1} << 62, int64_t{1} << 62}).numel(), 0);
  EXPECT_ERROR(broadcast_shapes({2}, {3}, "add"), "add: shapes [2] and [3] do not broadcast");
  EXPECT_EQ(channels_last_strides({2, 3, 4, 5}), (Strides{60, 1, 15, 3}));
}

TEST(Tensor, HandlesShareAndClonesDoNot) {
  Tensor a = tensor({{1, 2}, {3, 4}});
  Tensor b = a, c = a.clone();
  a.set({0, 0}, 9);
  EXPECT_EQ(b.at({0, 0}), 9);
  EXPECT_EQ(c.at({0, 0}), 1);
  EXPECT_TRUE(a.is_same(b));
  EXPECT_FALSE(a.is_same(c));
}

TEST(Tensor, MakesWhatIsAskedFor) {
  EXPECT_EQ(arange(0, 5, 2).to_vector(), (std::vector<double>{0, 2, 4}));
  EXPECT_EQ(arange(3, 0, -1, {.dtype = i64}).to_vector<int64_t>(), (std::vector<int64_t>{3, 2, 1}));
  EXPECT_EQ(linspace(0, 1, 5).to_vector(), (std::vector<double>{0, .25, .5, .75, 1}));
  EXPECT_EQ(full({2}, 7, {.dtype = u8}).to_vector(), (std::vector<double>{7, 7}));
  EXPECT_EQ(tensor({{1, 2, 3}}).shape(), (Shape{1, 3}));
  EXPECT_EQ(tensor(5.0).dim(), 0);
  EXPECT_ERROR(tensor({{1, 2}, {3}}), "ragged");
  EXPECT_ERROR(arange(0, 1, 0), "step must be finite and not zero");
  EXPECT_ERROR(arange(0, 1, -1), "does not lead");
  EXPECT_ERROR(linspace(0, 1, -1), "must not be negative");
  EXPECT_ERROR(zeros({-1}), "must not be negative");
  EXPECT_ERROR(from_span<float>(std::vector<float>{1, 2}, {3}), "2 values do not fill shape [3]");
  EXPECT_THROW(empty({int64_t{1} << 50}), OutOfMemoryError);
  EXPECT_EQ(zeros({2}).to_vector().size(), 2u);  // and the program goes on
}

TEST(Tensor, ItemAndAccess) {
  EXPECT_EQ(tensor({{42}}).item<int>(), 42);
  EXPECT_EQ(full({}, 9007199254740992.0, {.dtype = i64}).item<int64_t>(), int64_t{1} << 53);
  EXPECT_ERROR(tensor({1, 2}).item(), "needs a tensor with one element, got [2] f32 on cpu");
  EXPECT_ERROR(tensor({1, 2}).at({2}), "out of range");
  EXPECT_ERROR(tensor({1, 2}).at({0, 0}), "does not fit shape");
  EXPECT_ERROR(tensor({1, 2}).data<double>(), "asked for f64, the tensor is [2] f32 on cpu");
  EXPECT_ERROR(Tensor().shape(), "undefined");
}

TEST(Tensor, ConvertsEveryDtypeToEveryOther) {
  for (DType from : {f32, f64, bf16, f16, i64, i32, u8, b8})
    for (DType to : {f32, f64, bf16, f16, i64, i32, u8, b8}) {
      const Tensor x = tensor({{0, 1}, {2, 3}}).to(from).to(to);
      const bool boolean = from == b8 || to == b8;
      EXPECT_EQ(x.dtype(), to);
      EXPECT_EQ(x.to_vector(), boolean ? (std::vector<double>{0, 1, 1, 1}) : (std::vector<double>{0, 1, 2, 3}))
          << from << " to " << to;
    }
}

TEST(Tensor, HalfTypesRoundToNearestEven) {
  const auto f16_of = [](float x) { return static_cast<float>(Float16(x)); };
  const auto bf16_of = [](float x) { return static_cast<float>(BFloat16(x)); };
  EXPECT_EQ(f16_of(65504.f), 65504.f);
  EXPECT_EQ(f16_of(65520.f), INFINITY);
  EXPECT_EQ(f16_of(65519.f), 65504.f);
  EXPECT_EQ(f16_of(0x1p-24f), 0x1p-24f);
  EXPECT_EQ(f16_of(0x1p-25f), 0.f);
  EXPECT_EQ(f16_of(0x1.8p-25f), 0x1p-24f);
  EXPECT_EQ(f16_of(2049.f), 2048.f);
  EXPECT_EQ(f16_of(2051.f), 2052.f);
  EXPECT_TRUE(std::isnan(f16_of(NAN)));
  EXPECT_EQ(f16_of(-INFINITY), -INFINITY);
  EXPECT_EQ(bf16_of(257.f), 256.f);
  EXPECT_EQ(bf16_of(259.f), 260.f);
  EXPECT_TRUE(std::isnan(bf16_of(NAN)));
  EXPECT_EQ(bf16_of(INFINITY), INFINITY);
  for (uint32_t bits = 0; bits < 65536; ++bits) {  // every half survives the trip through float
    Float16 half;
    half.bits = static_cast<uint16_t>(bits);
    const float value = half;
    if (value == value) {
      EXPECT_EQ(Float16(value).bits, half.bits);
    }
  }
}

TEST(Tensor, ViewsShareAndFollowGeometry) {
  const Tensor x = arange(0, 24).reshape({2, 3, 4});
  EXPECT_EQ(x.permute({2, 0, 1}).at({3, 1, 2}), 23);
  EXPECT_EQ(x.transpose(0, 2).reshape({4, 6}).to_vector()[1], 12);
  EXPECT_EQ(x.slice(2, 1, 4, 2).to_vector(), (std::vector<double>{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23}));
  EXPECT_EQ(x.slice(2, -1, 100).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(x.select(1, -1).to_vector()[0], 8);
  EXPECT_EQ(x.narrow(0, 1, 1).storage(), x.storage());
  EXPECT_EQ(x.view({4, -1}).shape(), (Shape{4, 6}));
  EXPECT_EQ(x.transpose(1, 2).flatten(1).storage() == x.storage(), false);  // needs a copy
  EXPECT_ERROR(x.transpose(1, 2).view({2, 12}), "needs a copy");
  EXPECT_ERROR(x.view({5, -1}), "cannot make [5, -1] of [2, 3, 4]");
  EXPECT_ERROR(x.narrow(0, 1, 2), "do not fit axis 0");
  EXPECT_ERROR(x.permute({0, 0, 1}), "names an axis twice");
  EXPECT_ERROR(x.expand({3, 3, 4}), "cannot expand [2, 3, 4] to [3, 3, 4]");
  EXPECT_ERROR(x.size(3), "out of range");
  EXPECT_ERROR(as_strided(x, {5, 5}, {5, 1}, 0), "reaches outside");
  EXPECT_ERROR(as_strided(x, {2}, {1}, INT64_MAX), "reaches outside");
}

TEST(Tensor, InPlaceWritesAreCountedAndChecked) {
  Tensor x = zeros({3});
  const uint64_t before = x.storage()->version();
  x.add_(ones({3}), 2).mul_(3);
  EXPECT_EQ(x.to_vector(), (std::vector<double>{6, 6, 6}));
  EXPECT_GT(x.storage()->version(), before);
  Tensor y = arange(0, 4);
  y.slice(0, 1, 4).copy_(y.slice(0, 0, 3));  // overlapping
  EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 1, 2}));
  EXPECT_ERROR(zeros({1}).expand({4}).fill_(1), "expanded view");
  EXPECT_ERROR(zeros({1}, {.requires_grad = true}).fill_(1), "in-place write");
}

TEST(Tensor, Prints) {
  EXPECT_EQ(to_string(tensor({{1, 2}, {3, 4}})),
            "tensor([[1., 2.],\n        [3., 4.]], shape=[2, 2], dtype=f32, device=cpu)");
  EXPECT_EQ(to_string(tensor({0.5, -1.25})), "tensor([ 0.5000, -1.2500], shape=[2], dtype=f32, device=cpu)");
  EXPECT_EQ(to_string(tensor({1, 0}).to(b8)), "tensor([ true, false], shape=[2], dtype=bool, device=cpu)");
  EXPECT_EQ(to_string(full({}, 3, {.dtype = i64})), "tensor(3, shape=[], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(zeros({2, 0})), "tensor([], shape=[2, 0], dtype=f32, device=cpu)");
  EXPECT_NE(to_string(tensor({1e-9, 1})).find("1.0000e-09"), std::string::npos);
  EXPECT_EQ(to_string(arange(0, 2000, 1, {.dtype = i64})),
            "tensor([   0,    1,    2, ..., 1997, 1998, 1999], shape=[2000], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(Tensor()), "tensor(undefined)");
}

TEST(Tensor, MemoryIsCountedAndReturned) {
  const int64_t before = memory::stats().current;
  {
    const Tensor x = empty({1 << 20});
    EXPECT_EQ(memory::stats().current - before, 4 << 20);
  }
  EXPECT_EQ(memory::stats().current, before);
}

TEST(Tensor, BorrowsAndReleasesForeignMemory) {
  std::vector<float> values{1, 2, 3};
  bool released = false;
  {
    const Tensor x = from_blob(values.data(), {3}, {}, [&](void*) { released = true; });
    x.fill_(5);
  }
  EXPECT_TRUE(released);
  EXPECT_EQ(values[2], 5);
}

TEST(Device, ParsesAndRefuses) {
  EXPECT_EQ(Device::parse("cuda:3"), Device::cuda(3));
  EXPECT_EQ(Device::parse("cpu"), Device::cpu());
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cpu:0"})
    EXPECT_ERROR(Device::parse(bad), "expected cpu, cuda or cuda:N");
  if (!cuda::is_available()) {
    EXPECT_ERROR(zeros({1}, {.device = Device::cuda()}), "device cuda:0 asked for: ");
    EXPECT_ERROR(zeros({1}).to(Device::cuda()), "device cuda:0 asked for: ");
  }
}

}  // namespace
}  // namespace voxgrad
