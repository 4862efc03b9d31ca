// Helpers for tests of CUDA kernels against the CPU: views with random layouts and equal contents on both devices, and
// workspaces that are full of NaN. Guard values surround each view and fill the gaps between its elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "ops/create.h"
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

/// The memory layout of a view. Views start at a random, possibly unaligned element, except those of the last three
/// layouts.
enum class Layout {
  contiguous,            // row-major
  channels_last,         // channels innermost
  spaced,                // axes in any order, with gaps
  flipped,               // like spaced, also with negative and zero strides; for inputs only
  dense_channels_last,   // channels_last, aligned to 16 bytes
  padded_channels_last,  // channels_last, aligned to 16 bytes, the channels of a voxel padded to a multiple of 8
                         // elements
  aligned_contiguous     // contiguous, aligned to 16 bytes
};
/// Returns one of the first four layouts for an input, or one of the first three for an output.
inline Layout any_layout(Random& random, bool input) { return static_cast<Layout>(random.integer(0, input ? 3 : 2)); }

/// A view with the given layout, and the 1-D buffers on the CPU and on the GPU that contain its elements. The other
/// elements of the buffers are guard values.
struct RandomView {
  Tensor cpu;  // the buffer on the CPU
  Tensor gpu;  // the buffer on the GPU
  View view;
  int64_t start = 0;         // offset of the first element in the buffers
  std::vector<bool> inside;  // for each element of the buffer, whether it belongs to the view

  RandomView(DType dtype, const Shape& shape, Layout layout, Random& random) {
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.size);
    std::vector<int> order;  // axes in memory, outermost first
    for (int axis = 0; axis < view.rank; ++axis) order.push_back(axis);
    const bool dense = layout == Layout::dense_channels_last, padded = layout == Layout::padded_channels_last;
    if ((layout == Layout::channels_last || dense || padded) && view.rank > 2)
      std::rotate(order.begin() + 1, order.begin() + 2, order.end());
    const bool spaced = layout == Layout::spaced || layout == Layout::flipped;
    if (spaced) random.shuffle(order);
    const int zero = layout == Layout::flipped && random.chance(0.3) ? order.back() : -1;
    int64_t step = spaced ? random.integer(1, 3) : 1;
    const bool aligned = dense || padded || layout == Layout::aligned_contiguous;
    start = kMargin + (aligned ? 0 : random.integer(0, 3));
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

  /// Fills the view with random integers in [low, high], or with random reals if `whole` is false, on both devices.
  RandomView& fill(Random& random, double low, double high, bool whole = true) {
    each([&](int64_t position) {
      cpu.set({position},
              whole ? static_cast<double>(random.integer(static_cast<int64_t>(low), static_cast<int64_t>(high)))
                    : random.real(low, high));
    });
    gpu = cpu.to(Device::cuda());
    return *this;
  }
  /// Prepares an output: fills the view with NaN on both devices.
  RandomView& poison() {
    each([&](int64_t position) { cpu.set({position}, std::numeric_limits<double>::quiet_NaN()); });
    poisoned_ = cpu.clone();
    restore_poison();
    return *this;
  }
  /// Restores the NaNs on the GPU only.
  void restore_poison() { gpu = poisoned_.to(Device::cuda()); }

  View on(Device device) const {
    View placed = view;
    placed.device = device.is_cuda() ? device.index : -1;
    placed.data = static_cast<char*>((device.is_cuda() ? gpu : cpu).mutable_raw_data()) + start * item_size(view.dtype);
    return placed;
  }

  /// Succeeds if each GPU element differs from the CPU element by at most `tolerance` times the largest CPU element,
  /// and the guards are unchanged.
  ::testing::AssertionResult matches_cpu(double tolerance) const {
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
  static constexpr int64_t kMargin = 64;  // guard values before and after the view
  Tensor poisoned_;                       // the CPU buffer with the view full of NaN

  /// Calls f with the buffer position of every element of the view.
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

/// For the lifetime of the object, fills each workspace of the kernels that this thread calls with NaN. A kernel that
/// reads an element of its workspace before it writes the element thus gets a wrong result. Also poisons tensors that
/// are allocated during this lifetime; they must be destroyed before the object.
class PoisonedWorkspaces {
 public:
  PoisonedWorkspaces() = default;
  PoisonedWorkspaces(const PoisonedWorkspaces&) = delete;
  PoisonedWorkspaces& operator=(const PoisonedWorkspaces&) = delete;

 private:
  static constexpr int64_t kBytes = int64_t{1} << 30;
  // The pool is a block of the caching allocator, and no two blocks may begin at the same address.
  static constexpr int64_t kFirst = 512;

  /// Returns the next part of the pool, or null if the pool is too small.
  void* allocate(int64_t bytes, int device) {
    if (used_ + bytes > kBytes) return nullptr;
    const View block{pool_.mutable_data<uint8_t>() + used_, DType::u8, device, 1, {bytes}, {1}};
    cuda_kernels().fill(block, 255);  // all bits are 1, which is NaN in bf16, f16, f32 and f64
    used_ += (bytes + kFirst - 1) / kFirst * kFirst;
    ++live_;
    return block.data;
  }
  void deallocate() {
    if (--live_ == 0) used_ = kFirst;
  }

  Tensor pool_ = empty({kBytes}, {.dtype = DType::u8, .device = Device::cuda()});
  int64_t used_ = kFirst;  // bytes
  int live_ = 0;           // blocks
  const cuda::ExternalAllocator allocator_{
      [this](size_t bytes, int device, void*) { return allocate(static_cast<int64_t>(bytes), device); },
      [this](void*, int, void*) { deallocate(); }};
  const cuda::AllocatorGuard guard_{allocator_};
};

/// The first seed of tests that loop over seeds. A failing test prints its seed.
inline constexpr unsigned kFirstSeed = 20240;

/// Skips its tests if there is no GPU.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  }
};

}  // namespace voxgrad::cudatest
