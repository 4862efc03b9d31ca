// softmax and log_softmax along one axis. The maximum is subtracted first; exponentials are summed in double.
#include <cmath>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/eigen.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

/// Computes up to kBlock lines of any strides at once.
template <class T>
struct Columns {
  Offsets axis;    // strides of y and x along a line
  Offsets across;  // strides of y and x between lines
  int64_t length;  // elements per line
  bool logarithm;

  void operator()(T* y, const T* x, int64_t count) const {
    T row[kBlock], top[kBlock];
    double total[kBlock] = {};
    const auto load = [&](int64_t k) {
      for (int64_t j = 0; j < count; ++j) row[j] = x[k * axis[1] + j * across[1]];
    };
    load(0);
    std::copy_n(row, count, top);
    for (int64_t k = 1; k < length; ++k) {
      load(k);
      for (int64_t j = 0; j < count; ++j) top[j] = extremum<true>(top[j], row[j]);
    }
    for (int64_t k = 0; k < length; ++k) {
      load(k);
      T power[kBlock];
      map_blocks<T>([](const Block<T>& a, const Block<T>& b) -> Block<T> { return exp_block<T>(a - b); }, count, power,
                    static_cast<const T*>(row), static_cast<const T*>(top));
      for (int64_t j = 0; j < count; ++j) {
        total[j] += power[j];
        y[k * axis[0] + j * across[0]] = logarithm ? row[j] - top[j] : power[j];
      }
    }
    for (int64_t j = 0; j < count; ++j) total[j] = logarithm ? std::log(total[j]) : 1 / total[j];
    for (int64_t k = 0; k < length; ++k)
      for (int64_t j = 0; j < count; ++j) {
        T& value = y[k * axis[0] + j * across[0]];
        value = static_cast<T>(logarithm ? value - total[j] : value * total[j]);
      }
  }
};

/// Computes a line of `length` contiguous elements.
template <class T>
void softmax_row(T* y, const T* x, int64_t length, bool logarithm) {
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

/// Computes `count` lines. `along` holds the strides of y and x along a line, and `across` the strides between lines.
/// bf16 and f16 lines are converted to float32 buffers first.
template <class T>
void softmax_rows(T* y, const T* x, const Offsets& along, const Offsets& across, int64_t length, int64_t count,
                  bool logarithm) {
  using C = compute_t<T>;
  if constexpr (!std::is_same_v<T, C>) {
    const int64_t elements = length * count;
    std::vector<C> wide(static_cast<size_t>(2 * elements));
    C *wide_x = wide.data(), *wide_y = wide.data() + elements;
    // The copies are contiguous along the axis that is contiguous in x.
    const bool rows = along[1] == 1;
    const Offsets step = rows ? Offsets{1, length} : Offsets{count, 1};  // strides along and across lines
    const auto for_each = [&](auto f) {
      for (int64_t k = 0; k < length; ++k)
        for (int64_t j = 0; j < count; ++j) f(k * step[0] + j * step[1], k, j);
    };
    for_each([&](int64_t i, int64_t k, int64_t j) { wide_x[i] = x[k * along[1] + j * across[1]]; });
    softmax_rows<C>(wide_y, wide_x, {step[0], step[0]}, {step[1], step[1]}, length, count, logarithm);
    for_each([&](int64_t i, int64_t k, int64_t j) { y[k * along[0] + j * across[0]] = T(wide_y[i]); });
  } else if (along[0] == 1 && along[1] == 1 && length >= kBlock) {
    for (int64_t j = 0; j < count; ++j) softmax_row(y + j * across[0], x + j * across[1], length, logarithm);
  } else {
    Columns<T>{along, across, length, logarithm}(y, x, count);
  }
}

}  // namespace

void softmax(const View& y, const View& x, int axis, bool logarithm) {
  const int64_t length = x.size[axis];
  if (length == 0) return;
  const auto nest = make_nest(axis, y, x);
  const Offsets across = nest.inner_stride(), along{y.stride[axis], x.stride[axis]};
  dispatch(Floats(), x.dtype, logarithm ? "log_softmax" : "softmax", "CPU", [&]<class T>() {
    for_each_row(
        nest,
        [&](const Offsets& offset, int64_t count) {
          softmax_rows(y.as<T>() + offset[0], x.as<const T>() + offset[1], along, across, length, count, logarithm);
        },
        kBlock, length);
  });
}

}  // namespace voxgrad::cpu
