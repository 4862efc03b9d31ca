// A reference of convolutions: a loop in double over all products in the definition. Checks kernels against it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"

namespace voxgrad::convtest {

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

inline double dot(Block<double>& a, Block<double>& b) {
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
inline Case convolution(int64_t batch, int64_t x_channels, int64_t y_channels, Triple x_size, Triple kernel,
                        ConvGeometry geometry = {}) {
  Case c{batch, x_channels, y_channels, x_size, kernel, geometry, Triple(0)};
  for (int i = 0; i < 3; ++i)
    c.y_size[i] = conv_output_size(x_size[i], kernel[i], geometry.stride[i], geometry.padding[i], geometry.dilation[i]);
  return c;
}

/// Returns a case of conv_transpose3d. The size of x, its output, follows from the size of y.
inline Case transposed(int64_t batch, int64_t y_channels, int64_t x_channels, Triple y_size, Triple kernel,
                       ConvGeometry geometry = {}, Triple output_padding = 0) {
  Case c{batch, x_channels, y_channels, Triple(0), kernel, geometry, y_size};
  for (int i = 0; i < 3; ++i)
    c.x_size[i] = conv_transpose_output_size(y_size[i], kernel[i], geometry.stride[i], geometry.padding[i],
                                             output_padding[i], geometry.dilation[i]);
  return c;
}

}  // namespace voxgrad::convtest
