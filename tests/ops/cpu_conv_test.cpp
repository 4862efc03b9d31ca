// Tests the CPU kernels of convolutions. The expected results come from a loop in double over all products in the
// definition of a convolution.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"

namespace voxgrad {
namespace {

enum class Layout {
  contiguous,
  channels_last,
  spaced,   // guard values between the elements
  reversed  // spatial axes with negative strides
};

/// A 5-D tensor with its own buffer. Guard values surround the tensor; in the spaced layout they also separate its
/// elements.
template <class T>
struct Block {
  static constexpr T kGuard = T(-12345);
  static constexpr size_t kMargin = 64;
  std::vector<T> buffer;
  View view;

  Block(std::array<int64_t, 5> size, Layout layout) {
    std::array<int, 5> order{0, 1, 2, 3, 4};  // axes in memory, outermost first
    if (layout == Layout::channels_last) order = {0, 2, 3, 4, 1};
    view.dtype = dtype_of<T>;
    view.rank = 5;
    int64_t step = layout == Layout::spaced ? 3 : 1;
    for (int i = 4; i >= 0; --i) {
      const int axis = order[static_cast<size_t>(i)];
      view.size[axis] = size[static_cast<size_t>(axis)];
      view.stride[axis] = step;
      step *= view.size[axis];
      if (layout == Layout::spaced) step += 2;
    }
    buffer.assign(static_cast<size_t>(step) + 2 * kMargin, kGuard);
    view.data = buffer.data() + kMargin;
    if (layout == Layout::reversed)
      for (int axis = 2; axis < 5 && view.numel() > 0; ++axis) {
        view.data = view.as<T>() + (view.size[axis] - 1) * view.stride[axis];
        view.stride[axis] = -view.stride[axis];
      }
  }

  Block(Block&&) = default;  // the view stays valid, because moving a vector keeps its memory

  T& at(const std::array<int64_t, 5>& i) {
    int64_t offset = 0;
    for (size_t axis = 0; axis < 5; ++axis) offset += i[axis] * view.stride[axis];
    return view.as<T>()[offset];
  }
  /// Calls f(index, element) for every element of the view.
  template <class F>
  void each(const F& f) {
    std::array<int64_t, 5> i{};
    const auto* s = view.size;
    for (i[0] = 0; i[0] < s[0]; ++i[0])
      for (i[1] = 0; i[1] < s[1]; ++i[1])
        for (i[2] = 0; i[2] < s[2]; ++i[2])
          for (i[3] = 0; i[3] < s[3]; ++i[3])
            for (i[4] = 0; i[4] < s[4]; ++i[4]) f(i, at(i));
  }
  void fill_integers(std::mt19937& random) {
    std::uniform_int_distribution<int> pick(-8, 8);
    each([&](auto&, T& value) { value = static_cast<T>(pick(random)); });
  }
  void poison() {
    each([](auto&, T& value) { value = std::numeric_limits<T>::quiet_NaN(); });
  }
  /// Returns true if all elements of the buffer outside the view still hold the guard value.
  bool guards_intact() {
    int64_t guards = 0, all = static_cast<int64_t>(buffer.size());
    std::vector<T> saved = buffer;
    each([&](auto&, T& value) { value = T(0); });
    for (const T& value : buffer) guards += value == kGuard;
    buffer = saved;
    return guards == all - view.numel();
  }
};

/// The shapes and the geometry of y = conv(x, w).
struct Case {
  int64_t batch = 1;
  int64_t x_channels = 1;
  int64_t y_channels = 1;
  Triple x_size{1};
  Triple kernel{1};
  ConvGeometry geometry;
  Triple y_size{0};

  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << "batch " << c.batch << ", channels " << c.x_channels << " -> " << c.y_channels << ", x " << c.x_size
               << ", y " << c.y_size << ", kernel " << c.kernel << ", stride " << c.geometry.stride << ", padding "
               << c.geometry.padding << ", dilation " << c.geometry.dilation << ", groups " << c.geometry.groups;
  }
};

/// Calls f(x position, y position, tap) for every product of the convolution. The output and both gradients are sums
/// over these triples.
template <class F>
void for_each_product(const Case& c, const F& f) {
  const ConvGeometry& g = c.geometry;
  auto axis = [&](int i, const auto& body) {
    for (int64_t o = 0; o < c.y_size[i]; ++o)
      for (int64_t k = 0; k < c.kernel[i]; ++k) {
        const int64_t at = o * g.stride[i] - g.padding[i] + k * g.dilation[i];
        if (at >= 0 && at < c.x_size[i]) body(o, k, at);
      }
  };
  axis(0, [&](int64_t od, int64_t kd, int64_t d) {
    axis(1, [&](int64_t oh, int64_t kh, int64_t h) {
      axis(2, [&](int64_t ow, int64_t kw, int64_t w) { f(Triple(d, h, w), Triple(od, oh, ow), Triple(kd, kh, kw)); });
    });
  });
}

double dot(Block<double>& a, Block<double>& b) {
  double sum = 0;
  a.each([&](const std::array<int64_t, 5>& i, double& value) { sum += value * b.at(i); });
  return sum;
}

/// Random integer tensors x, y and w of a case. The expected results of the three kernels are the gradients of
/// sum(y * conv(x, w)) with respect to x, y and w.
template <class T>
class ConvCheck {
 public:
  ConvCheck(const Case& c, Layout layout, unsigned seed)
      : c_(c),
        x_(shape_x(), layout),
        y_(shape_y(), layout),
        w_(shape_w(), layout == Layout::reversed ? layout : Layout::contiguous) {
    std::mt19937 random(seed);
    x_.fill_integers(random);
    y_.fill_integers(random);
    w_.fill_integers(random);
    bias_y_ = bias(c.y_channels, random);
    bias_x_ = bias(c.x_channels, random);
    scatter();
  }

  /// Runs the three kernels without bias, with bias, and with bias and ReLU. Expects exact results, because sums of
  /// such small integers are exact.
  void expect_exact(Layout layout) {
    const Kernels& table = cpu_kernels();
    for (const auto& [with_bias, relu] : {std::pair(false, false), std::pair(true, false), std::pair(true, true)}) {
      const View by = bias_view(bias_y_), bx = bias_view(bias_x_);
      Block<T> y(shape_y(), layout);
      y.poison();
      table.conv_forward(y.view, x_.view, w_.view, {with_bias ? &by : nullptr, relu}, c_.geometry);
      expect_equal("conv_forward", y, expected_y_, with_bias ? &bias_y_ : nullptr, relu);
      Block<T> x(shape_x(), layout);
      x.poison();
      table.conv_backward_data(x.view, y_.view, w_.view, {with_bias ? &bx : nullptr, relu}, c_.geometry);
      expect_equal("conv_backward_data", x, expected_x_, with_bias ? &bias_x_ : nullptr, relu);
    }
    Block<T> w(shape_w(), layout);
    w.poison();
    table.conv_backward_weight(w.view, x_.view, y_.view, c_.geometry);
    expect_equal("conv_backward_weight", w, expected_w_, nullptr);
  }

 private:
  std::array<int64_t, 5> shape_x() const { return {c_.batch, c_.x_channels, c_.x_size[0], c_.x_size[1], c_.x_size[2]}; }
  std::array<int64_t, 5> shape_y() const { return {c_.batch, c_.y_channels, c_.y_size[0], c_.y_size[1], c_.y_size[2]}; }
  std::array<int64_t, 5> shape_w() const {
    return {c_.y_channels, c_.x_channels / c_.geometry.groups, c_.kernel[0], c_.kernel[1], c_.kernel[2]};
  }
  static std::vector<T> bias(int64_t channels, std::mt19937& random) {
    std::uniform_int_distribution<int> pick(-8, 8);
    std::vector<T> values;
    for (int64_t i = 0; i < 2 * channels; ++i) values.push_back(static_cast<T>(pick(random)));
    return values;
  }
  /// Returns a view of every second value, because a bias need not be contiguous.
  static View bias_view(std::vector<T>& values) {
    View view;
    view.data = values.data();
    view.dtype = dtype_of<T>;
    view.rank = 1;
    view.size[0] = static_cast<int64_t>(values.size() / 2);
    view.stride[0] = 2;
    return view;
  }

  /// Computes the expected results: adds each product of the convolution to the three sums that contain it.
  void scatter() {
    for (Block<double>* block : {&expected_x_, &expected_y_, &expected_w_})
      block->each([](auto&, double& v) { v = 0; });
    const int64_t x_group = c_.x_channels / c_.geometry.groups, y_group = c_.y_channels / c_.geometry.groups;
    const int64_t x_step = x_.view.stride[1], y_step = y_.view.stride[1];
    for_each_product(c_, [&](const Triple& i, const Triple& o, const Triple& k) {
      for (int64_t n = 0; n < c_.batch; ++n) {
        const T *x = &x_.at({n, 0, i[0], i[1], i[2]}), *y = &y_.at({n, 0, o[0], o[1], o[2]});
        for (int64_t co = 0; co < c_.y_channels; ++co)
          for (int64_t ci = 0; ci < x_group; ++ci) {
            const int64_t from = co / y_group * x_group + ci;
            const std::array<int64_t, 5> at_w{co, ci, k[0], k[1], k[2]};
            const double value_x = x[from * x_step], value_y = y[co * y_step], value_w = w_.at(at_w);
            expected_y_.at({n, co, o[0], o[1], o[2]}) += value_x * value_w;
            expected_x_.at({n, from, i[0], i[1], i[2]}) += value_y * value_w;
            expected_w_.at(at_w) += value_y * value_x;
          }
      }
    });
  }

  void expect_equal(const char* what, Block<T>& actual, Block<double>& sums, const std::vector<T>* bias,
                    bool relu = false) {
    int64_t wrong = 0;
    actual.each([&](const std::array<int64_t, 5>& i, T& value) {
      const double sum = sums.at(i) + (bias ? (*bias)[static_cast<size_t>(2 * i[1])] : 0);
      const double expected = relu ? std::max(sum, 0.0) : sum;
      if (value == expected) return;
      if (wrong++ == 0)
        ADD_FAILURE() << what << (bias ? " with bias" : "") << (relu ? " and ReLU" : "") << ": " << value << " at ["
                      << i[0] << ", " << i[1] << ", " << i[2] << ", " << i[3] << ", " << i[4] << "] instead of "
                      << expected << " (" << c_ << ")";
    });
    EXPECT_EQ(wrong, 0) << what;
    EXPECT_TRUE(actual.guards_intact()) << what << " wrote outside its output (" << c_ << ")";
  }

  Case c_;
  Block<T> x_;
  Block<T> y_;
  Block<T> w_;
  Block<double> expected_x_{shape_x(), Layout::contiguous};
  Block<double> expected_y_{shape_y(), Layout::contiguous};
  Block<double> expected_w_{shape_w(), Layout::contiguous};
  std::vector<T> bias_x_;
  std::vector<T> bias_y_;
};

/// Returns a case of conv3d. The size of y follows from the size of x.
Case convolution(int64_t batch, int64_t x_channels, int64_t y_channels, Triple x_size, Triple kernel,
                 ConvGeometry geometry = {}) {
  Case c{batch, x_channels, y_channels, x_size, kernel, geometry, Triple(0)};
  for (int i = 0; i < 3; ++i)
    c.y_size[i] = conv_output_size(x_size[i], kernel[i], geometry.stride[i], geometry.padding[i], geometry.dilation[i]);
  return c;
}

/// Returns a case of conv_transpose3d. The size of x, its output, follows from the size of y.
Case transposed(int64_t batch, int64_t y_channels, int64_t x_channels, Triple y_size, Triple kernel,
                ConvGeometry geometry = {}, Triple output_padding = 0) {
  Case c{batch, x_channels, y_channels, Triple(0), kernel, geometry, y_size};
  for (int i = 0; i < 3; ++i)
    c.x_size[i] = conv_transpose_output_size(y_size[i], kernel[i], geometry.stride[i], geometry.padding[i],
                                             output_padding[i], geometry.dilation[i]);
  return c;
}

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
}  // namespace voxgrad
