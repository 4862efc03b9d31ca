// prelu and its gradient.
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

template <class T>
void prelu_forward(const Slabs& slabs, const View& y, const View& x, const View& weight) {
  map_channels<T>(
      slabs, slopes<T>(slabs, weight), [](T slope, T v, T) { return v > 0 ? v : slope * v; }, y, x, x);
}

template <class T>
void prelu_gradients(const Slabs& slabs, const View& dx, const View& dweight, const View& dy, const View& x,
                     const View& weight) {
  map_channels<T>(
      slabs, slopes<T>(slabs, weight), [](T slope, T d, T v) { return v > 0 ? d : slope * d; }, dx, dy, x);
  sum_channels<T>(
      slabs, dweight, [](size_t, T d, T v) { return v > 0 ? 0 : double{d} * double{v}; }, dy, x);
}

}  // namespace

void prelu(const View& y, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu", "CPU", [&]<class T>() { prelu_forward<compute_t<T>>(slabs, y, x, weight); });
}

void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight) {
  const Slabs slabs(x);
  dispatch(Floats(), x.dtype, "prelu_backward", "CPU",
           [&]<class T>() { prelu_gradients<compute_t<T>>(slabs, dx, dweight, dy, x, weight); });
}

}  // namespace voxgrad::cpu
