// Tests Tensor methods with overlapping memory, with values that a dtype cannot hold, and with huge views.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/dtype.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using Doubles = std::vector<double>;
using Integers = std::vector<int64_t>;

TEST(Methods, ToIntegerSaturatesFloatsOutOfRange) {
  const Doubles values{NAN, INFINITY, -INFINITY, 1e30,    -1e30, -1,     -0.75,   -0.0,   0.75,   255.75,
                       256, -1048576, 0x1p31,    -0x1p31, 65504, 0x1p63, -0x1p63, 0x1p62, -0x1p40};
  const auto expected = [](double value, DType to) -> int64_t {
    const double lowest = to == u8 ? 0 : to == i32 ? INT32_MIN : -0x1p63;
    const int64_t highest = to == u8 ? 255 : to == i32 ? INT32_MAX : INT64_MAX;
    if (std::isnan(value)) return 0;
    if (value >= static_cast<double>(highest)) return highest;
    return static_cast<int64_t>(std::trunc(std::max(value, lowest)));
  };
  for (const Device device : devices())
    for (const DType from : {f32, f64, bf16, f16}) {
      const Tensor x = from_span<double>(values, {static_cast<int64_t>(values.size())}, device).to(from);
      const Doubles stored = x.to(f64).to_vector();
      for (const DType to : {i64, i32, u8}) {
        Integers all;
        for (double value : stored) all.push_back(expected(value, to));
        EXPECT_EQ(x.to(to).to_vector<int64_t>(), all) << from << " to " << to << " on " << device;
      }
      for (size_t i = 0; i < stored.size(); ++i)
        EXPECT_EQ(x.to(b8).to_vector<int64_t>()[i], stored[i] != 0) << from << " to bool: " << stored[i];
    }
}

TEST(Methods, ToSmallerIntegerKeepsLowBits) {
  const Integers values{-1, 256, 0x1'8000'0001, -129, INT64_MIN, INT64_MAX};
  for (const Device device : devices()) {
    const Tensor x = from_span<int64_t>(values, {6}, device);
    EXPECT_EQ(x.to(u8).to_vector<int64_t>(), (Integers{255, 0, 1, 127, 0, 255}));
    EXPECT_EQ(x.to(i32).to_vector<int64_t>(), (Integers{-1, 256, INT32_MIN + 1, -129, 0, -1}));
  }
}

/// A buffer with the numbers 0, 1, ... Each call of at() returns a tensor with a new storage, but all these storages
/// use the memory of the buffer and may overlap.
struct SharedBuffer {
  std::vector<float> buffer;

  explicit SharedBuffer(size_t count = 8) : buffer(count) { std::iota(buffer.begin(), buffer.end(), 0.f); }
  Tensor at(size_t start, const Shape& shape) { return from_blob(buffer.data() + start, shape, {}, {}); }
};

TEST(Methods, CopyHandlesOverlappingStorages) {
  constexpr int64_t kMany = 5000;  // more elements than copy_ handles at a time
  SharedBuffer blobs(kMany + 1);
  blobs.at(1, {kMany}).copy_(blobs.at(0, {kMany}));
  for (size_t i = 1; i <= kMany; ++i) ASSERT_EQ(blobs.buffer[i], static_cast<float>(i - 1));
  SharedBuffer square;
  square.at(0, {2, 2}).copy_(square.at(0, {2, 2}).transpose(0, 1));
  EXPECT_EQ(square.buffer, (std::vector<float>{0, 2, 1, 3, 4, 5, 6, 7}));
  SharedBuffer apart;
  apart.at(4, {4}).copy_(apart.at(0, {4}));
  EXPECT_EQ(apart.buffer, (std::vector<float>{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST(Methods, AddHandlesOverlappingStorages) {
  SharedBuffer blobs;
  blobs.at(1, {7}).add_(blobs.at(0, {7}));
  EXPECT_EQ(blobs.buffer, (std::vector<float>{0, 1, 3, 5, 7, 9, 11, 13}));
  SharedBuffer square;
  square.at(0, {2, 2}).add_(square.at(0, {2, 2}).transpose(0, 1));
  EXPECT_EQ(square.buffer, (std::vector<float>{0, 3, 3, 6, 4, 5, 6, 7}));
  SharedBuffer itself;
  itself.at(0, {8}).add_(itself.at(0, {8}));
  EXPECT_EQ(itself.buffer, (std::vector<float>{0, 2, 4, 6, 8, 10, 12, 14}));
}

TEST(Methods, CopyAndAddHandleViewsOfTheTarget) {
  for (const Device device : devices()) {
    const Tensor x = arange(0, 6, 1, {.device = device});
    x.slice(0, 0, 6, 2).copy_(x.slice(0, 1, 6, 2));  // interleaved elements
    EXPECT_EQ(x.to_vector(), (Doubles{1, 1, 3, 3, 5, 5}));
    x.add_(x.select(0, 4));  // the operand x[4] is also written
    EXPECT_EQ(x.to_vector(), (Doubles{6, 6, 8, 8, 10, 10}));
  }
}

TEST(Methods, SliceHandlesHugeViews) {
  const Tensor x = zeros({1}).expand({INT64_MAX});
  EXPECT_EQ(x.slice(0, 0, INT64_MAX, INT64_MAX).shape(), Shape{1});
  EXPECT_EQ(x.slice(0, 1, INT64_MAX, INT64_MAX - 1).shape(), Shape{1});
  EXPECT_EQ(x.slice(0, 5, 5, 7).shape(), Shape{0});
}

}  // namespace
}  // namespace voxgrad
