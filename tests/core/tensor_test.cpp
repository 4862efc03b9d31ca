// Tests of dtypes, shapes and tensors: creation, geometry, element access, conversion, printing, memory and errors.
#include "core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(DType, ParsesVoxgradAndPyTorchNames) {
  for (const DType dtype : {f32, f64, bf16, f16, i64, i32, u8, b8}) EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  EXPECT_EQ(parse_dtype("float"), f32);
  EXPECT_EQ(parse_dtype("bfloat16"), bf16);
  EXPECT_EQ(parse_dtype("half"), f16);
  EXPECT_EQ(parse_dtype("long"), i64);
  EXPECT_ERROR(parse_dtype("fp16"),
               "dtype: expected one of f32, float32, float, f64, float64, double, bf16, bfloat16, "
               "f16, float16, half, i64, int64, long, i32, int32, int, u8, uint8, bool, got 'fp16'");
  EXPECT_ERROR(parse_dtype(""), "got ''");
}

TEST(Dims, ComputesSizesBroadcastShapesAndStrides) {
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

TEST(Tensor, CopiesShareMemoryAndClonesDoNot) {
  Tensor a = tensor({{1, 2}, {3, 4}});
  Tensor b = a, c = a.clone();
  a.set({0, 0}, 9);
  EXPECT_EQ(b.at({0, 0}), 9);
  EXPECT_EQ(c.at({0, 0}), 1);
  EXPECT_TRUE(a.is_same(b));
  EXPECT_FALSE(a.is_same(c));
}

TEST(Tensor, FactoryFunctionsFillTensorsAndRejectBadArguments) {
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
  EXPECT_ERROR(from_span<float>(std::vector<float>{1, 2}, {3}), "shape [3] does not match the number of values, 2");
  EXPECT_ERROR(arange(0, -1e-200, 1e-200), "does not lead");
  EXPECT_EQ(arange(3, 3, -1).numel(), 0);
  EXPECT_ERROR(linspace(-1e308, 1e308, 2), "linspace: the distance from -1e+308 to 1e+308 overflows");
  EXPECT_ERROR(rand({-1}), "rand: sizes must not be negative");
  EXPECT_ERROR(zeros({-1}), "zeros: sizes must not be negative");
  EXPECT_ERROR(randn({2}, {.dtype = i64}), "randn: needs a floating-point dtype, got i64");
  EXPECT_ERROR(zeros_like(Tensor()), "zeros_like: the tensor is undefined");
  EXPECT_THROW(empty({int64_t{1} << 50}), OutOfMemoryError);
  EXPECT_EQ(zeros({2}).to_vector().size(), 2u);  // allocations still work after the error
}

TEST(Tensor, RejectsValuesThatDoNotFitTheDtype) {
  const TensorOptions bytes{.dtype = u8}, longs{.dtype = i64};
  const Tensor x = zeros({2}, bytes);
  EXPECT_ERROR(full({2}, NAN, longs), "full: nan does not fit i64");
  EXPECT_ERROR(full({2}, 0x1p63, longs), "full: 9.22337e+18 does not fit i64");
  EXPECT_ERROR(full({2}, -0x1p31 - 1, {.dtype = i32}), "does not fit i32");
  EXPECT_ERROR(full_like(x, -1), "full_like: -1 does not fit u8");
  EXPECT_ERROR(x.fill_(256), "fill_: 256 does not fit u8");
  EXPECT_ERROR(x.set({0}, NAN), "set: nan does not fit u8");
  EXPECT_ERROR(arange(0, 1e10, 1e9, {.dtype = i32}), "arange: 9e+09 does not fit i32");
  EXPECT_ERROR(tensor({1, 300}, bytes), "tensor: 300 does not fit u8");
  EXPECT_ERROR(pad(x, {1, 1}, 300), "pad: 300 does not fit u8");
  EXPECT_EQ(full({}, -0x1p63, longs).item<int64_t>(), INT64_MIN);
  EXPECT_EQ(full({}, 255.9, bytes).item<int>(), 255);
  EXPECT_EQ(full({}, NAN, {.dtype = b8}).item<int>(), 1);
  EXPECT_EQ(x.to_vector(), (std::vector<double>{0, 0}));
}

TEST(Tensor, RejectsReadsThatDoNotFitTheType) {
  const Tensor large = full({}, 0x1p40, {.dtype = i64});
  EXPECT_ERROR(large.item<int>(), "at: 1099511627776 does not fit the requested type, whose range is [-2147483648, ");
  EXPECT_ERROR(full({}, 300, {.dtype = i32}).item<uint8_t>(), "at: 300 does not fit");
  EXPECT_ERROR(full({}, -1, {.dtype = i32}).item<uint64_t>(), "at: -1 does not fit");
  EXPECT_ERROR(full({}, NAN).item<int64_t>(), "at: nan does not fit i64");
  EXPECT_ERROR(full({}, 1e30).item<int>(), "at: 1e+30 does not fit i64");
  EXPECT_ERROR(full({2}, -INFINITY).to_vector<int64_t>(), "to_vector: -inf does not fit i64");
  EXPECT_ERROR(full({2}, 0x1p63, {.dtype = f64}).to_vector<int64_t>(), "to_vector: 9.22337e+18 does not fit i64");
  EXPECT_EQ(full({}, -0x1p63, {.dtype = f64}).item<int64_t>(), INT64_MIN);
  EXPECT_EQ(full({}, 255.5).item<uint8_t>(), 255);
  EXPECT_EQ(large.item<uint64_t>(), uint64_t{1} << 40);
  EXPECT_EQ(full({}, 1e300, {.dtype = f64}).item<float>(), INFINITY);
  EXPECT_THROW(zeros({}).expand({int64_t{1} << 46}).to_vector(), OutOfMemoryError);  // larger than any address space
  EXPECT_THROW(zeros({}).expand({INT64_MAX}).to_vector<float>(), OutOfMemoryError);
}

TEST(Tensor, HandlesStridesNearThe64BitLimit) {
  const Tensor x = ones({4}, {.dtype = u8});
  const int64_t huge = int64_t{1} << 62;
  EXPECT_ERROR(as_strided(x, {2}, {INT64_MIN}, 3),
               "as_strided: the offsets of shape [2] with strides [-9223372036854775808] do not");
  EXPECT_ERROR(as_strided(x, {2, 2}, {-huge, -huge}, 3), "do not fit in 64 bits");
  EXPECT_ERROR(as_strided(x, {2}, {INT64_MIN + 1}, 3), "reaches outside a storage of 4 elements");
  EXPECT_ERROR(as_strided(x, {2}, {1}, INT64_MAX), "reaches outside");
  EXPECT_ERROR(as_strided(x, {2}, {1}, INT64_MIN), "reaches outside");
  EXPECT_TRUE(may_overlap({2, 2}, {INT64_MIN, INT64_MIN}));
  EXPECT_TRUE(may_overlap({8, 8}, {huge, huge + 1}));
  // The stride of an axis with one element is never used.
  const Tensor one = as_strided(x, {1, 2}, {INT64_MIN, 1}, 2);
  EXPECT_EQ(flip(one, {0, 1}).to_vector(), (std::vector<double>{1, 1}));
  EXPECT_EQ(as_strided(x, {1}, {INT64_MAX}, 3).slice(0, 1, 1).numel(), 0);
  EXPECT_EQ(zeros({}).expand({INT64_MAX}).slice(0, 1, INT64_MAX, INT64_MAX).shape(), (Shape{1}));
  EXPECT_EQ(flip(empty({0, int64_t{1} << 32, int64_t{1} << 31}), {0}).numel(), 0);
}

TEST(Tensor, HandlesSizesNearThe64BitLimit) {
  const int64_t huge = int64_t{1} << 62;
  const Tensor x = empty({0, huge});
  EXPECT_ERROR(pad(x, {huge, huge}), "pad: amounts 4611686018427387904 and 4611686018427387904 are too large");
  EXPECT_ERROR(pad(zeros({2}), {INT64_MIN, 0}), "are too large");
  EXPECT_ERROR(cat({x, x}, 1), "cat: the sum of the sizes along axis 1 does not fit in 64 bits");
  EXPECT_ERROR(flatten(empty({0, huge, 4}), 1), "flatten: the number of elements of [4611686018427387904, 4]");
  EXPECT_EQ(flatten(empty({0, huge, 4})).numel(), 0);
  const Tensor wide = empty({huge, 4, 0});
  EXPECT_EQ(empty_like(wide.unsqueeze(0).slice(1, 1, huge, 3).select(2, 1)).numel(), 0);
  EXPECT_EQ((empty({4, huge, 0, 3}) + 1.0).numel(), 0);
  EXPECT_EQ(sum(empty({2, 0, huge, 4}), {1, 2, 3}).to_vector(), (std::vector<double>{0, 0}));
  EXPECT_EQ(sum(empty({huge, 4, 0}), {0, 1}).numel(), 0);
  EXPECT_EQ(sum(empty({huge, 4, 0})).item(), 0);
}

TEST(Tensor, ReadsItemsAndChecksIndices) {
  EXPECT_TRUE(tensor({0.5}).item<bool>());
  EXPECT_FALSE(zeros({}, {.dtype = b8}).item<bool>());
  EXPECT_TRUE(full({}, 256, {.dtype = i64}).item<bool>());
  EXPECT_ERROR(tensor(1.0).size(0), "size: the tensor has no axes");
  EXPECT_EQ(tensor({{42}}).item<int>(), 42);
  EXPECT_EQ(full({}, 9007199254740992.0, {.dtype = i64}).item<int64_t>(), int64_t{1} << 53);
  EXPECT_ERROR(tensor({1, 2}).item(), "needs a tensor with one element, got [2] f32 on cpu");
  EXPECT_ERROR(tensor({1, 2}).at({2}), "out of range");
  EXPECT_ERROR(tensor({1, 2}).at({0, 0}), "does not fit shape");
  EXPECT_ERROR(tensor({1, 2}).data<double>(), "the requested dtype is f64, but the tensor is [2] f32 on cpu");
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
  for (uint32_t bits = 0; bits < 65536; ++bits) {  // the conversion to float and back keeps every f16 value
    Float16 half;
    half.bits = static_cast<uint16_t>(bits);
    const float value = half;
    if (value == value) {
      EXPECT_EQ(Float16(value).bits, half.bits);
    }
  }
}

TEST(Tensor, ViewsShareStorage) {
  const Tensor x = arange(0, 24).reshape({2, 3, 4});
  EXPECT_EQ(x.permute({2, 0, 1}).at({3, 1, 2}), 23);
  EXPECT_EQ(x.transpose(0, 2).reshape({4, 6}).to_vector()[1], 12);
  EXPECT_EQ(x.slice(2, 1, 4, 2).to_vector(), (std::vector<double>{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23}));
  EXPECT_EQ(x.slice(2, -1, 100).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(x.select(1, -1).to_vector()[0], 8);
  EXPECT_EQ(x.narrow(0, 1, 1).storage(), x.storage());
  EXPECT_EQ(x.view({4, -1}).shape(), (Shape{4, 6}));
  EXPECT_EQ(x.transpose(1, 2).flatten(1).storage() == x.storage(), false);  // flatten() had to copy
  EXPECT_ERROR(x.transpose(1, 2).view({2, 12}), "needs a copy");
  EXPECT_ERROR(x.view({5, -1}), "cannot reshape [2, 3, 4] to [5, -1]");
  EXPECT_ERROR(x.narrow(0, 1, 2), "do not fit axis 0");
  EXPECT_ERROR(x.permute({0, 0, 1}), "contains an axis twice");
  EXPECT_ERROR(x.expand({3, 3, 4}), "cannot expand [2, 3, 4] to [3, 3, 4]");
  EXPECT_ERROR(x.size(3), "out of range");
  EXPECT_EQ(x.slice(2, 1, 4, INT64_MAX).to_vector(), x.select(2, 1).to_vector());
  EXPECT_EQ(tensor(7.0).transpose(0, -1).item(), 7);
  EXPECT_ERROR(tensor(7.0).transpose(7, -9), "transpose: axis 7 is out of range for 0 axes");
  EXPECT_ERROR(as_strided(x, {5, 5}, {5, 1}, 0), "reaches outside");
  EXPECT_ERROR(as_strided(x, {2}, {1}, INT64_MAX), "reaches outside");
}

TEST(Tensor, InPlaceWritesIncrementTheVersionAndAreChecked) {
  Tensor x = zeros({3});
  const uint64_t before = x.storage()->version();
  x.add_(ones({3}), 2).mul_(3);
  EXPECT_EQ(x.to_vector(), (std::vector<double>{6, 6, 6}));
  EXPECT_GT(x.storage()->version(), before);
  Tensor y = arange(0, 4);
  y.slice(0, 1, 4).copy_(y.slice(0, 0, 3));  // source and target overlap
  EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 1, 2}));
  y.narrow(0, 1, 3).add_(y.narrow(0, 0, 3));
  EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 1, 3}));
  y.add_(y.reshape({2, 2}).transpose(0, 1).reshape({4})).zero_();
  EXPECT_EQ(y.to_vector(), (std::vector<double>(4, 0)));
  const Tensor windows = as_strided(y, {3, 2}, {1, 1}, 0), same = zeros({1}).expand({4});
  for (const Tensor& shared : {windows, same}) {
    EXPECT_ERROR(shared.fill_(1), "fill_: elements of the target share memory");
    EXPECT_ERROR(shared.add_(ones({1})), "add_: elements of the target share memory");
    EXPECT_ERROR(shared.mul_(2), "mul_: elements of the target share memory");
    EXPECT_ERROR(shared.copy_(ones({1})), "copy_: elements of the target share memory");
    EXPECT_ERROR(shared.set(Dims::filled(shared.dim(), 0), 1), "set: elements of the target share memory");
  }
  EXPECT_EQ(y.to_vector(), (std::vector<double>(4, 0)));
  as_strided(y, {2, 2}, {1, 2}, 0).fill_(3);  // covers each element once, in a different order
  EXPECT_EQ(y.to_vector(), (std::vector<double>(4, 3)));
  EXPECT_ERROR(y.copy_(ones({3})), "copy_: shapes [3] and [4] do not broadcast");
  EXPECT_ERROR(y.add_(ones({2, 4})), "add_: shape [2, 4] does not broadcast to [4]");
  EXPECT_ERROR(zeros({2}, {.dtype = i64}).mul_(0.5), "mul_: an integer tensor takes integer constants");
  EXPECT_ERROR(zeros({1}, {.requires_grad = true}).fill_(1), "in-place write");
  EXPECT_ERROR(zeros({1}, {.requires_grad = true}).zero_(), "zero_: an in-place write");
}

TEST(Tensor, PrintsValuesShapeDtypeAndDevice) {
  EXPECT_EQ(to_string(tensor({{1, 2}, {3, 4}})),
            "tensor([[1., 2.],\n        [3., 4.]], shape=[2, 2], dtype=f32, device=cpu)");
  EXPECT_EQ(to_string(tensor({0.5, -1.25})), "tensor([ 0.5000, -1.2500], shape=[2], dtype=f32, device=cpu)");
  EXPECT_EQ(to_string(tensor({1, 0}).to(b8)), "tensor([ true, false], shape=[2], dtype=bool, device=cpu)");
  EXPECT_EQ(to_string(full({}, 3, {.dtype = i64})), "tensor(3, shape=[], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(zeros({2, 0})), "tensor([], shape=[2, 0], dtype=f32, device=cpu)");
  EXPECT_NE(to_string(tensor({1e-9, 1})).find("1.0000e-09"), std::string::npos);
  EXPECT_EQ(to_string(arange(0, 2000, 1, {.dtype = i64})),
            "tensor([   0,    1,    2, ..., 1997, 1998, 1999], shape=[2000], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(tensor({0.5, NAN, -INFINITY})),
            "tensor([0.5000,    nan,   -inf], shape=[3], dtype=f32, device=cpu)");
  const std::vector<int64_t> large{(int64_t{1} << 53) + 1, INT64_MIN};
  EXPECT_EQ(to_string(from_span<int64_t>(large, {2})),
            "tensor([    9007199254740993, -9223372036854775808], shape=[2], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(Tensor()), "tensor(undefined)");
}

TEST(Tensor, PrintsLongRowsInLines) {
  EXPECT_EQ(to_string(arange(0, 40, 1, {.dtype = i64})),
            "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n"
            "        18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35,\n"
            "        36, 37, 38, 39], shape=[40], dtype=i64, device=cpu)");
  EXPECT_EQ(to_string(arange(0, 10).reshape({2, 5}) * 1e18),
            "tensor([[0.0000e+00, 1.0000e+18, 2.0000e+18, 3.0000e+18, 4.0000e+18],\n"
            "        [5.0000e+18, 6.0000e+18, 7.0000e+18, 8.0000e+18, 9.0000e+18]], shape=[2, 5], dtype=f32, "
            "device=cpu)");
  EXPECT_EQ(to_string(full({1, 7}, 1e-9)),
            "tensor([[1.0000e-09, 1.0000e-09, 1.0000e-09, 1.0000e-09, 1.0000e-09, 1.0000e-09,\n"
            "         1.0000e-09]], shape=[1, 7], dtype=f32, device=cpu)");
}

TEST(Tensor, PrintsOnlyTheEdgesOfLargeTensors) {
  const std::string expected =
      "tensor([[[   0,    1,    2, ...,   97,   98,   99],\n"
      "         [ 100,  101,  102, ...,  197,  198,  199]],\n\n"
      "        [[ 200,  201,  202, ...,  297,  298,  299],\n"
      "         [ 300,  301,  302, ...,  397,  398,  399]],\n\n"
      "        [[ 400,  401,  402, ...,  497,  498,  499],\n"
      "         [ 500,  501,  502, ...,  597,  598,  599]],\n\n"
      "        ...,\n\n"
      "        [[ 800,  801,  802, ...,  897,  898,  899],\n"
      "         [ 900,  901,  902, ...,  997,  998,  999]],\n\n"
      "        [[1000, 1001, 1002, ..., 1097, 1098, 1099],\n"
      "         [1100, 1101, 1102, ..., 1197, 1198, 1199]],\n\n"
      "        [[1200, 1201, 1202, ..., 1297, 1298, 1299],\n"
      "         [1300, 1301, 1302, ..., 1397, 1398, 1399]]], shape=[7, 2, 100], dtype=i64, device=";
  for (const Device device : devices()) {
    const Tensor x = arange(0, 1400, 1, {i64, device}).reshape({7, 2, 100});
    EXPECT_EQ(to_string(x), concat(expected, device, ")"));
    EXPECT_EQ(to_string(x.transpose(0, 2).contiguous().transpose(0, 2)), concat(expected, device, ")"));
  }
}

TEST(Tensor, CountsAndFreesMemory) {
  const int64_t before = memory::stats().current;
  {
    const Tensor x = empty({1 << 20});
    EXPECT_EQ(memory::stats().current - before, 4 << 20);
  }
  EXPECT_EQ(memory::stats().current, before);
}

TEST(Tensor, CachesLargeBlocksBySizeClass) {
  memory::empty_cache();
  const int64_t reserved = memory::stats().reserved;
  for (const int64_t bytes : {(1 << 17) - 1, 1 << 17, (1 << 17) + 1, (1 << 18) - 1, 1 << 18, 3000001}) {
    const void* address = nullptr;
    {
      const Tensor t = empty({bytes}, {.dtype = u8});
      address = t.raw_data();
      EXPECT_GE(memory::stats().reserved, reserved + bytes);
      EXPECT_LE(memory::stats().reserved, reserved + bytes + bytes / 8 + 64);
    }
    if (memory::stats().reserved > reserved) {  // false under the address sanitizer, which disables the cache
      const Tensor t = empty({bytes}, {.dtype = u8});
      EXPECT_EQ(t.raw_data(), address) << bytes;
    }
    memory::empty_cache();
    EXPECT_EQ(memory::stats().reserved, reserved) << bytes;
  }
}

TEST(Tensor, FromBlobBorrowsAndReleasesMemory) {
  std::vector<float> values{1, 2, 3};
  bool released = false;
  {
    const Tensor x = from_blob(values.data(), {3}, {}, [&](void*) { released = true; });
    x.fill_(5);
  }
  EXPECT_TRUE(released);
  EXPECT_EQ(values[2], 5);
  const Tensor x = from_blob(values.data(), {3}, {.requires_grad = true}, {});
  (x * x).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{10, 10, 10}));
  EXPECT_ERROR(from_blob(values.data(), {3}, {.dtype = i32, .requires_grad = true}, {}), "only floating-point tensors");
  EXPECT_ERROR(from_blob(nullptr, {3}, {}, {}), "from_blob: data is null");
}

TEST(Tensor, FromBlobDoesNotReleaseMemoryAfterAnError) {
  std::vector<double> values{1, 2, 3};
  bool released = false;
  const auto release = [&](void*) { released = true; };
  char* inside = reinterpret_cast<char*>(values.data()) + 4;
  EXPECT_ERROR(from_blob(inside, {1}, {.dtype = f64}, release), "is not aligned to the 8 bytes of an element of f64");
  EXPECT_ERROR(from_blob(inside, {1}, {.dtype = i32, .requires_grad = true}, release), "only floating-point tensors");
  EXPECT_ERROR(from_blob(inside, {-1}, {}, release), "must not be negative");
  EXPECT_FALSE(released);
  int releases = 0, made = 0;
  with_each_allocation_failing([&] {
    const Tensor x = from_blob(values.data(), {3}, {.dtype = f64, .requires_grad = true}, [&](void*) { ++releases; });
    ++made;
  });
  EXPECT_EQ(releases, made);
  EXPECT_GT(made, 0);
  EXPECT_EQ(from_blob(inside, {1}, {}, {}).numel(), 1);
}

TEST(Device, ParsesNamesAndRejectsInvalidOnes) {
  EXPECT_EQ(Device::parse("cuda:3"), Device::cuda(3));
  EXPECT_EQ(Device::parse("cpu"), Device::cpu());
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cpu:0"})
    EXPECT_ERROR(Device::parse(bad), "expected cpu, cuda or cuda:N");
  if (!cuda::is_available()) {
    EXPECT_ERROR(zeros({1}, {.device = Device::cuda()}), "cuda:0 is not available: ");
    EXPECT_ERROR(zeros({1}).to(Device::cuda()), "cuda:0 is not available: ");
  }
}

TEST(Tensor, ConvertsVectorsToTensors) {
  const auto expect = [](const Tensor& x, const char* described, const std::vector<double>& values) {
    EXPECT_EQ(concat(describe(x)), described);
    EXPECT_EQ(x.to_vector(), values);
  };
  expect(tensor(std::vector<float>{1.5f, -2}), "[2] f32 on cpu", {1.5, -2});
  expect(tensor(std::vector<double>{1e300}), "[1] f64 on cpu", {1e300});
  expect(tensor(std::vector<int64_t>{}), "[0] i64 on cpu", {});
  expect(tensor(std::vector<int>{1, 2, 3}), "[3] i32 on cpu", {1, 2, 3});
  expect(tensor(std::vector<uint8_t>{255}), "[1] u8 on cpu", {255});
  expect(tensor(std::vector<bool>{true, false, true}), "[3] bool on cpu", {1, 0, 1});
  expect(tensor({1, 2}), "[2] f32 on cpu", {1, 2});  // a braced list of ints is still f32
  const std::vector<float> values{7};
  for (const Device device : devices()) EXPECT_EQ(tensor(values, device).device(), device);
}

}  // namespace
}  // namespace voxgrad
