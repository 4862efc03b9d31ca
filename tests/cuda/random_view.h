// For tests of CUDA kernels against the CPU's: arrays of random shape in memory that holds guard values wherever
// the view does not reach, the same on both devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "ops/detail/kernels.h"
#include "tests/support.h"

namespace voxgrad::cudatest {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  bool chance(double probability) { return real(0, 1) < probability; }
  template <class T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  std::mt19937 engine_;
};

/// How the axes lie in memory. spaced: any order, with gaps; flipped: also negative and zero strides (inputs only).
/// dense_channels_last: at an address of an allocation, so that 16 bytes of channels are a vector.
/// padded_channels_last: with a voxel's channels every multiple of 8 elements.
enum class Layout { contiguous, channels_last, spaced, flipped, dense_channels_last, padded_channels_last };
inline Layout any_layout(Random& random, bool input) { return static_cast<Layout>(random.integer(0, input ? 3 : 2)); }

struct RandomView {
  Tensor cpu, gpu;  // the buffers, 1-D
  View view;
  int64_t start = 0;
  std::vector<bool> inside;

  RandomView(DType dtype, const Shape& shape, Layout layout, Random& random) {
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.size);
    std::vector<int> order;  // slowest first
    for (int axis = 0; axis < view.rank; ++axis) order.push_back(axis);
    const bool dense = layout == Layout::dense_channels_last, padded = layout == Layout::padded_channels_last;
    if ((layout == Layout::channels_last || dense || padded) && view.rank > 2)
      std::rotate(order.begin() + 1, order.begin() + 2, order.end());
    const bool spaced = layout == Layout::spaced || layout == Layout::flipped;
    if (spaced) random.shuffle(order);
    const int zero = layout == Layout::flipped && random.chance(0.3) ? order.back() : -1;
    int64_t step = spaced ? random.integer(1, 3) : 1;
    start = kMargin + (dense ? 0 : random.integer(0, 3));
    for (int i = view.rank - 1; i >= 0; --i) {
      const int axis = order[static_cast<size_t>(i)];
      if (axis == zero) continue;
      view.stride[axis] = step;
      step = step * std::max<int64_t>(shape[axis], 1) + (spaced ? random.integer(0, 3) : 0);
      if (padded && i == view.rank - 1) step = (step + 7) / 8 * 8;
      if (layout == Layout::flipped && shape[axis] > 0 && random.chance(0.3)) {
        start += view.stride[axis] * (shape[axis] - 1);
        view.stride[axis] = -view.stride[axis];
      }
    }
    cpu = empty({step + 2 * kMargin + 3}, {.dtype = dtype});
    std::memset(cpu.mutable_raw_data(), 0x7b, static_cast<size_t>(cpu.numel() * item_size(dtype)));
    inside.assign(static_cast<size_t>(cpu.numel()), false);
    each([&](int64_t position) { inside[static_cast<size_t>(position)] = true; });
  }

  /// Inputs: whole numbers, or any, in [low, high].
  RandomView& fill(Random& random, double low, double high, bool whole = true) {
    each([&](int64_t position) {
      cpu.set({position},
              whole ? static_cast<double>(random.integer(static_cast<int64_t>(low), static_cast<int64_t>(high)))
                    : random.real(low, high));
    });
    gpu = cpu.to(Device::cuda());
    return *this;
  }
  /// Outputs: NaN on the GPU where a result shall stand.
  RandomView& poison() {
    each([&](int64_t position) { cpu.set({position}, std::numeric_limits<double>::quiet_NaN()); });
    poisoned_ = cpu.clone();
    poison_again();
    return *this;
  }
  /// Of the GPU's half only.
  void poison_again() { gpu = poisoned_.to(Device::cuda()); }

  View on(Device device) const {
    View placed = view;
    placed.device = device.is_cuda() ? device.index : -1;
    placed.data = static_cast<char*>((device.is_cuda() ? gpu : cpu).mutable_raw_data()) + start * item_size(view.dtype);
    return placed;
  }

  /// The GPU's results are within `tolerance` of the CPU's largest, and its guards untouched.
  ::testing::AssertionResult same(double tolerance) const {
    const auto got = gpu.to_vector<double>(), expected = cpu.to_vector<double>();
    double scale = 0;
    for (size_t i = 0; i < got.size(); ++i)
      if (inside[i] && std::isfinite(expected[i])) scale = std::max(scale, std::abs(expected[i]));
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
      if (inside[i] && std::abs(got[i] - expected[i]) <= tolerance * scale) continue;
      return ::testing::AssertionFailure() << (inside[i] ? "element " : "guard ") << i << " of the buffer is " << got[i]
                                           << ", expected " << expected[i] << ", largest " << scale;
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr int64_t kMargin = 64;
  Tensor poisoned_;

  /// Calls f with the position in the buffer of every element of the view.
  template <class F>
  void each(const F& f) const {
    std::vector<int64_t> index(static_cast<size_t>(view.rank), 0);
    for (int64_t left = view.numel(); left > 0; --left) {
      int64_t position = start;
      for (size_t axis = 0; axis < index.size(); ++axis) position += index[axis] * view.stride[axis];
      f(position);
      for (size_t axis = index.size(); axis-- > 0;) {
        if (++index[axis] < view.size[axis]) break;
        index[axis] = 0;
      }
    }
  }
};

/// A sequence of seeds; each test prints the one at which it failed.
inline constexpr unsigned kFirstSeed = 20240;

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  }
};

}  // namespace voxgrad::cudatest
