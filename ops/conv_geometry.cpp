// Output sizes, gather forms (ops/detail/conv_geometry.h) and operation counts of convolutions.
#include "ops/detail/conv_geometry.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "core/detail/divide.h"
#include "ops/detail/kernels.h"

namespace voxgrad {
namespace {

// Sizes come from users and files, so intermediate products may exceed 64 bits even if the result is small.
using Wide = __int128;

int64_t narrow(Wide value, const char* op) {
  check(value >= std::numeric_limits<int64_t>::min() && value <= std::numeric_limits<int64_t>::max(), op,
        "the output size does not fit in 64 bits");
  return static_cast<int64_t>(value);
}

/// Returns value / divisor, rounded down. `value` may be negative.
template <class T>
T divide_down(T value, int64_t divisor) {
  return value / divisor - (value % divisor < 0 ? 1 : 0);
}

/// Returns the range of all q in [0, count) for which q * step + offset is in [0, size), or {0, 0} if there are none.
ConvRange steps_inside(int64_t step, int64_t offset, int64_t size, int64_t count) {
  const int64_t begin = divide_up(std::max<int64_t>(-offset, 0), step);
  const int64_t end = std::min(count, divide_up(std::max<int64_t>(size - offset, 0), step));
  return begin < end ? ConvRange{begin, end} : ConvRange{};
}

}  // namespace

int64_t conv_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const Wide room = Wide(size) + 2 * Wide(padding) - Wide(dilation) * (kernel - 1) - 1;
  return narrow(divide_down(room, stride) + 1, "conv_output_size");
}

int64_t conv_transpose_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                                   int64_t output_padding, int64_t dilation) {
  return narrow(Wide(size - 1) * stride - 2 * Wide(padding) + Wide(dilation) * (kernel - 1) + output_padding + 1,
                "conv_transpose_output_size");
}

int64_t ConvGather::steps() const {
  int64_t max_count = 0;
  for (const ConvPhase& phase : phases) max_count = std::max(max_count, phase.count);
  return max_count;
}

bool ConvGather::covers_all() const {
  int64_t covered = 0;
  for (const ConvPhase& phase : phases) covered += phase.count;
  return covered == out_size;
}

ConvGather gather_forward(const ConvAxis& axis) {
  ConvGather gather{axis.x_size, axis.y_size, axis.stride, 1, {}};
  if (axis.y_size <= 0) return gather;
  ConvPhase phase{0, axis.y_size, {}};
  for (int64_t k = 0; k < axis.kernel; ++k) phase.taps.push_back({k, k * axis.dilation - axis.padding});
  gather.phases.push_back(std::move(phase));
  return gather;
}

ConvGather gather_transposed(const ConvAxis& axis) {
  ConvGather gather{axis.y_size, axis.x_size, 1, axis.stride, {}};
  std::map<int64_t, std::vector<ConvTap>> phases;  // first output of a phase -> taps
  for (int64_t k = 0; k < axis.kernel; ++k) {
    const int64_t output = k * axis.dilation - axis.padding;  // the output that reads input 0 with this tap
    const int64_t step = divide_down(output, axis.stride);
    const int64_t first = output - step * axis.stride;
    if (first < axis.x_size) phases[first].push_back({k, -step});
  }
  for (auto& [first, taps] : phases)
    gather.phases.push_back({first, divide_up(axis.x_size - first, axis.stride), std::move(taps)});
  return gather;
}

ConvAxis conv_axis(const View& x, const View& w, const View& y, const ConvGeometry& g, int axis) {
  const int i = axis + 2;
  return {x.size[i], y.size[i], w.size[i], g.stride[axis], g.padding[axis], g.dilation[axis]};
}

double conv_flop(const View& x, const View& w, const View& y, const ConvGeometry& geometry) {
  double flop = 2.0 * static_cast<double>(x.size[0]) * static_cast<double>(y.size[1] * w.size[1]);
  for (int i = 0; i < 3; ++i) {
    const ConvAxis axis = conv_axis(x, w, y, geometry, i);
    int64_t products = 0;  // triples (i, o, k) that satisfy the formula of conv_geometry.h
    for (int64_t k = 0; k < axis.kernel; ++k) {
      const ConvRange range = steps_inside(axis.stride, k * axis.dilation - axis.padding, axis.x_size, axis.y_size);
      products += range.end - range.begin;
    }
    flop *= static_cast<double>(products);
  }
  return flop;
}

ConvRange tap_range(const ConvGather& gather, const ConvPhase& phase, const ConvTap& tap) {
  return steps_inside(gather.in_step, tap.offset, gather.in_size, phase.count);
}

}  // namespace voxgrad
