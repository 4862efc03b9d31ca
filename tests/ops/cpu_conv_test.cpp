// Tests the CPU kernels of convolutions against a loop over all products (conv_check.h).
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "tests/ops/conv_check.h"

namespace voxgrad::convtest {
namespace {

std::vector<Case> cases() {
  return {
      convolution(2, 3, 5, {5, 6, 7}, 3),
      convolution(1, 33, 24, {3, 4, 13}, {3, 2, 5}, {.padding = {1, 0, 2}}),
      convolution(1, 7, 40, {3, 4, 30}, 3, {.stride = {1, 2, 3}, .padding = 1}),
      convolution(2, 4, 6, {9, 8, 7}, 3, {.stride = 2, .padding = 2, .dilation = 2, .groups = 2}),
      convolution(1, 6, 6, {5, 5, 5}, 3, {.padding = 1, .groups = 6}),  // depthwise
      convolution(1, 5, 15, {4, 3, 6}, {1, 3, 2}, {.groups = 5}),       // depthwise, three outputs per channel
      // Depthwise, with more than one vector of outputs per row, more than eight rows, or more than eight channels.
      convolution(2, 3, 3, {6, 13, 37}, 3, {.padding = 1, .groups = 3}),
      convolution(1, 2, 4, {7, 9, 40}, 5, {.stride = 2, .padding = 2, .groups = 2}),
      convolution(1, 2, 2, {1, 15, 50}, {1, 7, 7}, {.padding = {0, 6, 6}, .dilation = {1, 2, 2}, .groups = 2}),
      convolution(1, 19, 19, {4, 5, 6}, 3, {.padding = 1, .groups = 19}),
      transposed(1, 3, 3, {4, 5, 19}, 3, {.stride = 2, .padding = 1, .groups = 3}, 1),
      transposed(1, 2, 6, {3, 4, 5}, {3, 5, 7}, {.stride = {1, 2, 3}, .padding = 2, .groups = 2}),
      // Pointwise, with few or many channels of x and of y.
      convolution(2, 5, 3, {7, 9, 11}, 1),
      convolution(2, 3, 40, {7, 9, 11}, 1),
      convolution(1, 70, 66, {5, 6, 7}, 1),
      convolution(1, 10, 20, {5, 6, 7}, 1, {.groups = 2}),
      convolution(1, 2, 3, {4, 4, 4}, 2, {.padding = 5}),  // padding > (k - 1) * dilation
      convolution(1, 2, 3, {40, 1, 41}, {3, 1, 3}, {.padding = {13, 0, 7}, .dilation = {17, 1, 19}}),
      convolution(3, 1, 1, 1, 1),
      convolution(1, 1, 70, {1, 1, 50}, {1, 1, 3}, {.padding = {0, 0, 1}}),
      convolution(2, 16, 16, {1, 17, 18}, {1, 3, 3}, {.padding = {0, 1, 1}}),
      transposed(1, 32, 16, {2, 3, 5}, {3, 5, 7}),
      transposed(1, 48, 24, {2, 3, 5}, 3),
      transposed(1, 8, 8, {3, 4, 6}, {3, 5, 7}, {.stride = 2, .padding = {1, 2, 3}, .groups = 4}, 1),
      transposed(2, 5, 7, {3, 4, 6}, 3, {.stride = 2, .padding = 1}, {1, 0, 1}),
      transposed(1, 5, 7, {3, 4, 5}, 3,
                 {.stride = 2, .padding = 1, .dilation = 2}),  // gcd(stride, dilation) = 2: 1 of 8 phases has taps
      transposed(1, 3, 4, {3, 2, 4}, {3, 4, 2}, {.stride = {4, 6, 3}, .dilation = {6, 4, 2}}),
      transposed(2, 3, 9, {3, 3, 4}, 2, {.stride = {4, 3, 5}}, {3, 0, 2}),  // stride > kernel
      transposed(1, 4, 8, {4, 4, 4}, 4, {.stride = 2, .padding = 1}),
      transposed(1, 2, 2, {3, 3, 3}, 3, {.stride = 1, .padding = 1}),
      transposed(1, 3, 2, {1, 1, 1}, {2, 1, 3}, {.stride = {1, 4, 2}}, {0, 3, 1}),
      transposed(1, 2, 2, {6, 7, 8}, 1, {.stride = 3, .padding = 4}),  // padding > kernel
      transposed(1, 2, 3, {2, 1, 2}, {1, 3, 2}, {.stride = {3, 1, 5000}, .padding = {0, 1, 20}}),
  };
}

class CpuConv : public testing::Test {
 protected:
  void TearDown() override { set_num_threads(threads_); }
  int threads_ = num_threads();
};

TEST_F(CpuConv, IsExactForSmallIntegers) {
  for (const Case& c : cases()) {
    ConvCheck<float>(c, Layout::contiguous, 1).expect_exact(Layout::contiguous);
    ConvCheck<double>(c, Layout::contiguous, 2).expect_exact(Layout::contiguous);
  }
}

TEST_F(CpuConv, HandlesStridedViews) {
  for (const Case& c : cases())
    for (Layout layout : {Layout::channels_last, Layout::spaced, Layout::reversed})
      ConvCheck<float>(c, layout, 3).expect_exact(layout == Layout::reversed ? Layout::contiguous : layout);
}

TEST_F(CpuConv, HandlesRandomShapes) {
  const unsigned seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  const int64_t channels[] = {1, 2, 3, 5, 7, 8, 17, 24, 33};
  for (int tried = 0; tried < 60;) {
    ConvGeometry g{.groups = pick(0, 2) ? 1 : pick(2, 4)};
    Triple size(0), kernel(0), output_padding(0);
    for (int i = 0; i < 3; ++i) {
      size[i] = pick(1, 10);
      kernel[i] = pick(1, pick(1, 2) == 1 ? 3 : 7);
      g.stride[i] = pick(1, 4);
      g.dilation[i] = pick(1, 3);
      g.padding[i] = pick(0, (kernel[i] - 1) * g.dilation[i] + 1);
      output_padding[i] = pick(0, std::max(g.stride[i], g.dilation[i]) - 1);
    }
    const int64_t a = channels[pick(0, 8)] * g.groups, b = channels[pick(0, 8)] * g.groups;
    const Case c = pick(0, 1) ? convolution(pick(1, 2), a, b, size, kernel, g)
                              : transposed(pick(1, 2), a, b, size, kernel, g, output_padding);
    const int64_t work = a * b / g.groups * kernel[0] * kernel[1] * kernel[2] * c.y_size[0] * c.y_size[1] * c.y_size[2];
    const auto is_empty = [](const Triple& t) { return std::min({t[0], t[1], t[2]}) < 1; };
    if (is_empty(c.x_size) || is_empty(c.y_size) || work > 1'000'000) continue;
    ++tried;
    const Layout layout = static_cast<Layout>(pick(0, 2));
    SCOPED_TRACE(testing::Message() << c);
    ConvCheck<float>(c, layout, seed).expect_exact(layout);
    if (HasFailure()) return;
  }
}

// Some cases need several tiles, some several ranges of channels, and some more weights than the kernel packs at once.
TEST_F(CpuConv, HandlesManyTiles) {
  for (const Case& c :
       {convolution(1, 3, 2, {20, 70, 90}, 3, {.padding = 1}), transposed(1, 700, 3, {2, 3, 5}, 3, {.stride = 2}),
        convolution(1, 700, 2, {4, 4, 4}, 3, {.padding = 1}), convolution(1, 70, 64, 10, 10),
        convolution(1, 64, 64, {20, 21, 22}, 1, {.groups = 64}), convolution(1, 600, 20, {20, 21, 22}, 1),
        convolution(1, 2, 2, {50, 60, 70}, 3, {.stride = {1, 2, 1}, .padding = 1, .groups = 2})})
    ConvCheck<float>(c, Layout::contiguous, 4).expect_exact(Layout::contiguous);
}

// Pointwise convolutions whose voxels nearly fill the register tiles have their own kernel. In the first case, the
// voxels are divided into several pieces, the last of which is shorter. The second case has a single piece and few
// channels. The third case has groups. The last case has few voxels; its last tile overlaps the previous one.
TEST_F(CpuConv, HandlesPointwiseKernels) {
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    for (const Case& c :
         {convolution(2, 37, 29, {11, 13, 15}, 1), convolution(1, 5, 3, {8, 8, 16}, 1),
          convolution(2, 6, 60, {9, 16, 17}, 1, {.groups = 3}), convolution(2, 130, 31, {5, 5, 5}, 1)}) {
      ConvCheck<float>(c, Layout::contiguous, 12).expect_exact(Layout::contiguous);
      ConvCheck<double>(c, Layout::contiguous, 13).expect_exact(Layout::contiguous);
      ConvCheck<float>(c, Layout::channels_last, 14).expect_exact(Layout::channels_last);
    }
  }
}

// Register tiles read whole vectors. Some of these volumes have fewer voxels than a tile. The input begins or ends at
// the edge of a page, next to memory that cannot be read.
TEST_F(CpuConv, ReadsNothingOutsideOfTheInput) {
  const int64_t page = sysconf(_SC_PAGESIZE), pages = 18;
  auto* const memory = static_cast<char*>(
      mmap(nullptr, static_cast<size_t>(pages * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  char *const begin = memory + page, *const end = memory + (pages - 1) * page;
  ASSERT_EQ(mprotect(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE), 0);
  for (const Shape& size : {Shape{1, 5, 6}, Shape{1, 3, 5}, Shape{1, 1, 31}, Shape{5, 5, 5}, Shape{4, 4, 8}}) {
    const Shape shape{1, 8, size[0], size[1], size[2]};
    const auto check = [&]<class T>(DType dtype, T) {
      const int64_t bytes = 8 * size[0] * size[1] * size[2] * int64_t{sizeof(T)};
      const Tensor w = randn({8, 8, 1, 1, 1}, {dtype}), x = randn(shape, {dtype}), expected = conv3d(x, w);
      for (char* const at : {begin, end - bytes}) {
        std::memcpy(at, x.data<T>(), static_cast<size_t>(bytes));
        const Tensor y = conv3d(from_blob(at, shape, {dtype}, {}), w);
        EXPECT_EQ(std::memcmp(y.data<T>(), expected.data<T>(), static_cast<size_t>(bytes)), 0) << size << dtype;
      }
    };
    check(f32, float{});
    check(f64, double{});
  }
  munmap(memory, static_cast<size_t>(pages * page));
}

// With more weights than inputs, blocks of channels run in parallel, and each block packs its own weights. In the
// second case some taps reach no output. The third case has groups.
TEST_F(CpuConv, HandlesFewVoxelsWithManyChannels) {
  for (const Case& c : {convolution(2, 150, 70, {3, 4, 4}, 3, {.padding = 1}),
                        transposed(2, 130, 66, {1, 2, 2}, 3, {.stride = {1, 4, 2}, .padding = {1, 2, 1}}),
                        convolution(1, 140, 66, {2, 3, 3}, {3, 2, 3}, {.padding = 1, .groups = 2})}) {
    ConvCheck<float>(c, Layout::contiguous, 9).expect_exact(Layout::contiguous);
    ConvCheck<double>(c, Layout::contiguous, 10).expect_exact(Layout::contiguous);
    ConvCheck<float>(c, Layout::channels_last, 11).expect_exact(Layout::channels_last);
  }
}

// The convolution kernels are so long that packed weights and tiles exceed the usual limits of the workspace.
TEST_F(CpuConv, HandlesLongKernels) {
  for (const Case& c :
       {convolution(1, 3, 2, {1, 1, 40000}, {1, 1, 40000}, {.padding = {0, 0, 2}}),
        convolution(1, 1, 2, {1, 500, 300}, {1, 250, 300}, {.stride = {1, 3, 1}, .dilation = {1, 2, 1}}),
        transposed(1, 2, 1, {1, 2, 3}, {1, 301, 300}, {.stride = {1, 400, 2}, .padding = {0, 7, 0}})})
    ConvCheck<float>(c, Layout::contiguous, 8).expect_exact(Layout::contiguous);
}

// The second case has few voxels. Blocks of channels therefore run in parallel, unless there are more threads than
// blocks. The third case is pointwise.
TEST_F(CpuConv, IsBitwiseIndependentOfThreadCount) {
  for (const Case& c :
       {transposed(2, 300, 20, {3, 6, 9}, 3, {.stride = 2, .padding = 1}, 1),
        convolution(2, 130, 70, {3, 4, 5}, 3, {.padding = 1}), convolution(1, 90, 40, {16, 17, 18}, 1)}) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    auto noise = [&](std::array<int64_t, 5> shape) {
      Block<float> block(shape, Layout::contiguous);
      block.each([&](auto&, float& value) { value = normal(random); });
      return block;
    };
    const std::array<int64_t, 5> x_shape{c.batch, c.x_channels, c.x_size[0], c.x_size[1], c.x_size[2]},
        y_shape{c.batch, c.y_channels, c.y_size[0], c.y_size[1], c.y_size[2]},
        w_shape{c.y_channels, c.x_channels, c.kernel[0], c.kernel[1], c.kernel[2]};
    Block<float> x = noise(x_shape), y = noise(y_shape), w = noise(w_shape);
    std::vector<std::vector<float>> first;
    for (int threads : {1, 2, 3, 7}) {
      set_num_threads(threads);
      Block<float> dx(x_shape, Layout::contiguous), dy(y_shape, Layout::contiguous), dw(w_shape, Layout::contiguous);
      cpu_kernels().conv_forward(dy.view, x.view, w.view, nullptr, c.geometry);
      cpu_kernels().conv_backward_data(dx.view, y.view, w.view, nullptr, c.geometry);
      cpu_kernels().conv_backward_weight(dw.view, x.view, y.view, c.geometry);
      std::vector<std::vector<float>> results{dx.buffer, dy.buffer, dw.buffer};
      if (first.empty()) first = results;
      EXPECT_TRUE(results == first) << threads << " threads";
    }
  }
}

// Expects <conv(x, w), y> = <x, conv_backward_data(y, w)> = <w, conv_backward_weight(x, y)> for random doubles, where
// <a, b> is the sum of the products of all elements.
TEST_F(CpuConv, KernelsAreAdjoint) {
  std::mt19937 random(6);
  std::normal_distribution<double> normal;
  for (const Case& c : cases()) {
    const std::array<int64_t, 5> x_shape{c.batch, c.x_channels, c.x_size[0], c.x_size[1], c.x_size[2]},
        y_shape{c.batch, c.y_channels, c.y_size[0], c.y_size[1], c.y_size[2]},
        w_shape{c.y_channels, c.x_channels / c.geometry.groups, c.kernel[0], c.kernel[1], c.kernel[2]};
    Block<double> x(x_shape, Layout::contiguous), y(y_shape, Layout::contiguous), w(w_shape, Layout::contiguous);
    for (Block<double>* block : {&x, &y, &w}) block->each([&](auto&, double& value) { value = normal(random); });
    Block<double> dx(x_shape, Layout::contiguous), dy(y_shape, Layout::contiguous), dw(w_shape, Layout::contiguous);
    cpu_kernels().conv_forward(dy.view, x.view, w.view, nullptr, c.geometry);
    cpu_kernels().conv_backward_data(dx.view, y.view, w.view, nullptr, c.geometry);
    cpu_kernels().conv_backward_weight(dw.view, x.view, y.view, c.geometry);
    const double dot_y = dot(dy, y), dot_x = dot(dx, x), dot_w = dot(dw, w);
    const double scale = std::sqrt(dot(dy, dy) * dot(y, y)) + 1e-300;
    EXPECT_LE(std::abs(dot_y - dot_x), 1e-12 * scale) << c;
    EXPECT_LE(std::abs(dot_y - dot_w), 1e-12 * scale) << c;
  }
}

TEST_F(CpuConv, AcceptsEmptyBatch) {
  Case c = convolution(0, 3, 4, {5, 5, 5}, 3);
  ConvCheck<float>(c, Layout::contiguous, 7).expect_exact(Layout::contiguous);
}

TEST_F(CpuConv, RejectsIntegerTensors) {
  Block<float> x({1, 1, 1, 1, 1}, Layout::contiguous);
  View wrong = x.view;
  wrong.dtype = DType::i64;
  EXPECT_THROW(cpu_kernels().conv_forward(wrong, wrong, wrong, nullptr, {}), Error);
  EXPECT_THROW(cpu_kernels().conv_backward_weight(wrong, wrong, wrong, {}), Error);
}

}  // namespace
}  // namespace voxgrad::convtest
