#include "ops/detail/conv_geometry.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "core/error.h"
#include "ops/detail/kernels.h"

namespace voxgrad {
namespace {

// Sizes come from users and files: intermediate products may pass 64 bits even where the result is small.
using Wide = __int128;

int64_t narrow(Wide value, const char* op) {
  check(value >= std::numeric_limits<int64_t>::min() && value <= std::numeric_limits<int64_t>::max(), op,
        "the output size does not fit 64 bits");
  return static_cast<int64_t>(value);
}

template <class T>
T floor_div(T a, int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

}  // namespace

int64_t conv_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const Wide room = Wide(size) + 2 * Wide(padding) - Wide(dilation) * (kernel - 1) - 1;
  return narrow(floor_div(room, stride) + 1, "conv_output_size");
}

int64_t conv_transpose_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                                   int64_t output_padding, int64_t dilation) {
  return narrow(Wide(size - 1) * stride - 2 * Wide(padding) + Wide(dilation) * (kernel - 1) + output_padding + 1,
                "conv_transpose_output_size");
}

int64_t ConvGather::steps() const {
  int64_t most = 0;
  for (const ConvPhase& phase : phases) most = std::max(most, phase.count);
  return most;
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
  std::map<int64_t, std::vector<ConvTap>> taps;  // by the phase's first output
  for (int64_t k = 0; k < axis.kernel; ++k) {
    const int64_t meets_zero = k * axis.dilation - axis.padding;  // the output that meets input 0
    const int64_t first = modulo(meets_zero, axis.stride);
    if (first < axis.x_size) taps[first].push_back({k, (first - meets_zero) / axis.stride});
  }
  for (auto& [first, found] : taps)
    gather.phases.push_back({first, ceil_div(axis.x_size - first, axis.stride), std::move(found)});
  return gather;
}

int64_t conv_meetings(const ConvAxis& axis) {
  int64_t count = 0;
  for (int64_t k = 0; k < axis.kernel; ++k) {
    const int64_t offset = k * axis.dilation - axis.padding;  // of the i that o = 0 meets
    const int64_t begin = std::max<int64_t>(0, ceil_div(-offset, axis.stride));
    const int64_t end = std::min(axis.y_size, ceil_div(axis.x_size - offset, axis.stride));
    count += std::max<int64_t>(0, end - begin);
  }
  return count;
}

double conv_flop(const View& x, const View& w, const View& y, const ConvGeometry& g) {
  double flop = 2.0 * static_cast<double>(x.size[0]) * static_cast<double>(y.size[1] * w.size[1]);
  for (int a = 0; a < 3; ++a)
    flop *= static_cast<double>(
        conv_meetings({x.size[a + 2], y.size[a + 2], w.size[a + 2], g.stride[a], g.padding[a], g.dilation[a]}));
  return flop;
}

ConvRange tap_range(const ConvGather& gather, const ConvPhase& phase, const ConvTap& tap) {
  const int64_t begin = std::max<int64_t>(0, ceil_div(-tap.offset, gather.in_step));
  const int64_t end = std::min(phase.count, ceil_div(gather.in_size - tap.offset, gather.in_step));
  return begin < end ? ConvRange{begin, end} : ConvRange{0, 0};
}

}  // namespace voxgrad
