// softmax and log_softmax along one axis. The maximum is subtracted first; exponentials are summed in double.
#include <cmath>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/eigen.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

/// Computes softmax or log_softmax of up to kBlock lines at once. A line consists of the elements along the axis for
/// one index of each other axis. The strides along a line and between lines are arbitrary.
template <class T>
struct LineBlock {
  Offsets axis;    // strides of y and x along a line
  Offsets across;  // strides of y and x between lines
  int64_t length;  // elements per line
  bool logarithm;

  void operator()(T* y, const T* x, int64_t count) const {
    using C = compute_t<T>;
    C element[kBlock];  // element k of each line
    C top[kBlock];      // the maximum of each line
    double total[kBlock] = {};
    const auto load = [&](int64_t k) {
      for (int64_t j = 0; j < count; ++j) element[j] = x[k * axis[1] + j * across[1]];
    };
    load(0);
    std::copy_n(element, count, top);
    for (int64_t k = 1; k < length; ++k) {
      load(k);
      for (int64_t j = 0; j < count; ++j) top[j] = extremum<true>(top[j], element[j]);
    }
    // The results before the division by the total are stored in y or, for bf16 and f16, in `wide`.
    std::vector<C> wide(std::is_same_v<T, C> ? 0 : static_cast<size_t>(length * count));
    const auto intermediate = [&](int64_t k, int64_t j) -> C& {
      if constexpr (std::is_same_v<T, C>)
        return y[k * axis[0] + j * across[0]];
      else
        return wide[static_cast<size_t>(k * count + j)];
    };
    for (int64_t k = 0; k < length; ++k) {
      load(k);
      C power[kBlock];
      map_blocks<C>([](const Block<C>& a, const Block<C>& b) -> Block<C> { return exp_block<C>(a - b); }, count, power,
                    static_cast<const C*>(element), static_cast<const C*>(top));
      for (int64_t j = 0; j < count; ++j) {
        total[j] += power[j];
        intermediate(k, j) = logarithm ? element[j] - top[j] : power[j];
      }
    }
    for (int64_t j = 0; j < count; ++j) total[j] = logarithm ? std::log(total[j]) : 1 / total[j];
    for (int64_t k = 0; k < length; ++k)
      for (int64_t j = 0; j < count; ++j) {
        const C value = intermediate(k, j);
        y[k * axis[0] + j * across[0]] = convert<T>(static_cast<C>(logarithm ? value - total[j] : value * total[j]));
      }
  }
};

/// Computes softmax or log_softmax of a line of `length` contiguous elements.
template <class T>
void softmax_line(T* y, const T* x, int64_t length, bool logarithm) {
  const T top = fold_lanes(length, x[0], extremum<true, T>, [x](int64_t k) { return x[k]; });
  map_blocks<T>([top](const Block<T>& a) -> Block<T> { return exp_block<T>(a - top); }, length, y, x);
  const double total = sum_lanes(length, [y](int64_t k) { return static_cast<double>(y[k]); });
  if (logarithm) {
    const double shift = std::log(total);
    for (int64_t k = 0; k < length; ++k) y[k] = static_cast<T>(x[k] - top - shift);
  } else {
    const double scale = 1 / total;
    for (int64_t k = 0; k < length; ++k) y[k] = static_cast<T>(y[k] * scale);
  }
}

}  // namespace

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  const int64_t length = x.size[axis];
  if (length == 0) return;
  const auto nest = make_nest(axis, y, x);
  const Offsets across = nest.inner_stride(), along{y.stride[axis], x.stride[axis]};
  dispatch(Floats(), x.dtype, logarithm ? "log_softmax" : "softmax", "CPU", [&]<class T>() {
    const auto compute = [&](const Offsets& offset, int64_t count) {
      T* const to = y.as<T>() + offset[0];
      const T* const from = x.as<const T>() + offset[1];
      if constexpr (std::is_floating_point_v<T>)
        if (along[0] == 1 && along[1] == 1 && length >= kBlock) {
          for (int64_t j = 0; j < count; ++j) softmax_line(to + j * across[0], from + j * across[1], length, logarithm);
          return;
        }
      LineBlock<T>{along, across, length, logarithm}(to, from, count);
    };
    for_each_row(nest, compute, kBlock, length);
  });
}

}  // namespace voxgrad::cpu
