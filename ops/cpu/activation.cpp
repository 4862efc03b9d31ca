// Activations with sums per channel in their gradients: prelu and its gradient, and the gradient of gelu.
#include <vector>

#include "ops/cpu/slabs.h"

namespace voxgrad::cpu {
namespace {

/// Returns the slope of each channel of each sample.
template <class T>
std::vector<T> slopes(const Slabs& slabs, const View& weight) {
  std::vector<T> result(static_cast<size_t>(slabs.samples * slabs.channels));
  for (size_t i = 0; i < result.size(); ++i)
    result[i] = static_cast<T>(entry(&weight, static_cast<int64_t>(i) % slabs.channels, 0));
  return result;
}

}  // namespace

void prelu(const View& y, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    map_channels<C>(
        slabs, slopes<C>(slabs, weight), [](C slope, C v, C) { return v > 0 ? v : slope * v; }, y, x, x);
  });
}

void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu_backward", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    map_channels<C>(
        slabs, slopes<C>(slabs, weight), [](C slope, C d, C v) { return v > 0 ? d : slope * d; }, dx, dy, x);
    sum_channels<C>(
        slabs, dweight, [](size_t, C d, C v) { return v > 0 ? 0 : double{d} * double{v}; }, dy, x);
  });
}

void gelu_backward(const View& y, const View& dx, const View& sums, const View& dy, const View& x) {
  unary(UnaryOp::gelu, y, x, 0, 0);
  binary(BinaryOp::gelu_grad, dx, dy, x, 0, 0);
  sum_channels(Slabs(dx), sums, dx);
}

}  // namespace voxgrad::cpu
