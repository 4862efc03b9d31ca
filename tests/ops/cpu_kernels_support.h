// Helpers for tests that call the CPU kernels directly: strided arrays surrounded by guard memory, and the comparison
// of arrays with expected values in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "ops/detail/kernels.h"
#include "tests/support.h"

namespace voxgrad::kerneltest {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline const Kernels& cpu_table = cpu_kernels();

enum class Layout {
  contiguous,  // row-major
  reversed,    // column-major
  stepped,     // gaps between elements and rows
  flipped,     // negative strides
  expanded     // stride 0 along the first axis
};
inline constexpr Layout kOutputLayouts[] = {Layout::contiguous, Layout::reversed, Layout::stepped};
inline constexpr Layout kInputLayouts[] = {Layout::contiguous, Layout::reversed, Layout::stepped, Layout::flipped,
                                           Layout::expanded};

/// A strided view with its own memory. All elements, inside and outside the view, start as poison(). No test
/// expects poison() as a result, except tests of bool, for which poison() is true.
template <class T>
struct Array {
  std::vector<char> bytes;
  View view;
  static constexpr T poison() { return static_cast<T>(static_cast<float>(std::is_same_v<T, bool> ? 1 : 117)); }

  explicit Array(Shape shape, Layout layout = Layout::contiguous) {
    view.dtype = dtype_of<T>;
    view.rank = static_cast<int>(shape.size());
    const int64_t step = layout == Layout::stepped ? 2 : 1;
    int64_t total = step, start = 0;
    for (int i = 0; i < view.rank; ++i) {
      const int axis = layout == Layout::reversed ? i : view.rank - 1 - i;
      view.size[axis] = shape[axis];
      view.stride[axis] = total;
      if (layout == Layout::expanded && axis == 0) {
        view.stride[axis] = 0;
        continue;
      }
      if (layout == Layout::flipped) {
        start += total * std::max<int64_t>(0, shape[axis] - 1);
        view.stride[axis] = -total;
      }
      total *= shape[axis] + (step > 1);
    }
    bytes.resize(static_cast<size_t>(total + 16) * sizeof(T));
    std::fill_n(data(), total + 16, poison());
    view.data = data() + 8 + start;
  }
  T* data() { return reinterpret_cast<T*>(bytes.data()); }
  Shape shape() const { return Shape(std::span(view.size, static_cast<size_t>(view.rank))); }
  T& operator()(const Dims& index) const {
    int64_t offset = 0;
    for (int64_t i = 0; i < index.size(); ++i) offset += index[i] * view.stride[i];
    return view.as<T>()[offset];
  }
  /// Returns the number of elements outside the view that were overwritten.
  int64_t count_stray_writes() {
    std::vector<char> inside(bytes.size() / sizeof(T));
    visit([&](const Dims& i) { inside[static_cast<size_t>(&(*this)(i)-data())] = 1; });
    int64_t count = 0;
    for (size_t i = 0; i < inside.size(); ++i) count += !inside[i] && !(data()[i] == poison());
    return count;
  }
  /// Calls f with every index, in row-major order.
  void visit(const std::function<void(const Dims&)>& f) const {
    if (view.numel() == 0) return;
    Dims index = Dims::filled(view.rank, 0);
    for (int64_t n = view.numel(); n > 0; --n) {
      f(index);
      for (int axis = view.rank - 1; axis >= 0; --axis) {
        if (++index[axis] < view.size[axis]) break;
        index[axis] = 0;
      }
    }
  }
  Array& random(double low, double high, unsigned seed = 1) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<double> draw(low, high);
    visit([&](const Dims& i) { (*this)(i) = static_cast<T>(static_cast<float>(draw(engine))); });
    return *this;
  }
};

/// Expects every element of `a` to be close to expected(index), and all memory outside the view to be unchanged.
template <class T>
void expect_close(Array<T>& a, const std::function<double(const Dims&)>& expected, double tolerance) {
  int shown = 0;
  a.visit([&](const Dims& i) {
    const double got = static_cast<double>(a(i)), want = expected(i);
    const bool same = got == want || (std::isnan(got) && std::isnan(want)) ||
                      std::abs(got - want) <= tolerance * (1 + std::abs(want));
    if (!same && ++shown <= 3) ADD_FAILURE() << "at " << i << ": " << got << ", expected " << want;
  });
  EXPECT_EQ(a.count_stray_writes(), 0);
}

/// Returns the error allowed for results of dtype T, relative to 1 + |expected|.
template <class T>
double tolerance() {
  return std::is_same_v<T, BFloat16> ? 0x1p-8 : sizeof(T) == 2 ? 0x1p-11 : sizeof(T) == 4 ? 2e-6 : 1e-14;
}

/// Calls f.operator()<T>() for float and double.
template <class F>
void for_floats(F f) {
  f.template operator()<float>();
  f.template operator()<double>();
}
/// Calls f.operator()<T>() for all floating-point dtypes.
template <class F>
void for_all_floats(F f) {
  for_floats(f);
  f.template operator()<BFloat16>();
  f.template operator()<Float16>();
}

}  // namespace voxgrad::kerneltest
