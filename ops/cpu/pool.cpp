// Max pooling of tensors (N, C, D, H, W) and its gradient.
#include <limits>
#include <vector>

#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

using Indices = Types<int32_t, int64_t>;

/// The maxima of a row of windows.
template <class T>
struct RowMaxima {
  std::vector<T> values;
  std::vector<int64_t> indices;  // positions of the maxima; -1 for a window that contains only padding

  /// Updates the maxima with one tap of each window. The tap of window o is element o * stride + shift of the input row
  /// x; taps outside the row are skipped. `position` is the index of the row's first element within the channel.
  void update(const T* x, int64_t x_step, int64_t width, int64_t stride, int64_t shift, int64_t position) {
    const int64_t begin = shift < 0 ? divide_up(-shift, stride) : 0;
    const int64_t end = std::min(static_cast<int64_t>(values.size()), (width - 1 - shift + stride) / stride);
    T* best = values.data();
    int64_t* at = indices.data();
    for (int64_t o = begin; o < end; ++o) {
      const int64_t i = o * stride + shift;
      const T candidate = x[i * x_step];
      const int first = at[o] < 0;
      const int larger = candidate > best[o];
      const int first_nan = candidate != candidate ? best[o] == best[o] : 0;
      const bool wins = (first | larger | first_nan) != 0;
      best[o] = wins ? candidate : best[o];
      at[o] = wins ? position + i : at[o];
    }
  }
};

/// Computes row (od, oh) of the output of one channel.
template <class T>
void pool_row(RowMaxima<T>& row, const T* x, const View& v, const PoolGeometry& g, int64_t od, int64_t oh) {
  std::fill(row.values.begin(), row.values.end(), convert<T>(-std::numeric_limits<compute_t<T>>::infinity()));
  std::fill(row.indices.begin(), row.indices.end(), -1);
  const int64_t first_d = od * g.stride[0] - g.padding[0], first_h = oh * g.stride[1] - g.padding[1];
  for (int64_t kd = 0; kd < g.kernel_size[0]; ++kd) {
    const int64_t id = first_d + kd * g.dilation[0];
    if (id < 0 || id >= v.size[2]) continue;
    for (int64_t kh = 0; kh < g.kernel_size[1]; ++kh) {
      const int64_t ih = first_h + kh * g.dilation[1];
      if (ih < 0 || ih >= v.size[3]) continue;
      for (int64_t kw = 0; kw < g.kernel_size[2]; ++kw)
        row.update(x + id * v.stride[2] + ih * v.stride[3], v.stride[4], v.size[4], g.stride[2],
                   kw * g.dilation[2] - g.padding[2], (id * v.size[3] + ih) * v.size[4]);
    }
  }
}

/// Stores row (od, oh) of channel number `channel`.
template <class T, class From>
void store_row(const View& v, int64_t channel, int64_t od, int64_t oh, const std::vector<From>& row) {
  T* out = channel_data<T>(v, channel) + od * v.stride[2] + oh * v.stride[3];
  for (size_t ow = 0; ow < row.size(); ++ow) out[static_cast<int64_t>(ow) * v.stride[4]] = static_cast<T>(row[ow]);
}

}  // namespace

void max_pool(const View& y, const View* indices, const View& x, const PoolGeometry& geometry) {
  if (y.numel() == 0) return;
  const int64_t depth = y.size[2], height = y.size[3], width = y.size[4];
  const int64_t taps = geometry.kernel_size[0] * geometry.kernel_size[1] * geometry.kernel_size[2];
  dispatch(Floats(), x.dtype, "max_pool", "CPU", [&]<class T>() {
    parallel_for(y.size[0] * y.size[1] * depth, grain_of(height * width * taps), [&](int64_t begin, int64_t end) {
      RowMaxima<T> row{std::vector<T>(static_cast<size_t>(width)), std::vector<int64_t>(static_cast<size_t>(width))};
      for (int64_t i = begin; i < end; ++i) {
        const int64_t channel = i / depth, od = i % depth;
        for (int64_t oh = 0; oh < height; ++oh) {
          pool_row(row, channel_data<const T>(x, channel), x, geometry, od, oh);
          store_row<T>(y, channel, od, oh, row.values);
          if (!indices) continue;
          dispatch(Indices(), indices->dtype, "max_pool", "CPU",
                   [&]<class Index>() { store_row<Index>(*indices, channel, od, oh, row.indices); });
        }
      }
    });
  });
}

void max_pool_backward(const View& dx, const View& dy, const View& indices, const PoolGeometry&) {
  const int64_t voxels = dx.size[2] * dx.size[3] * dx.size[4];
  dispatch(Floats(), dy.dtype, "max_pool_backward", "CPU", [&]<class T>() {
    dispatch(Indices(), indices.dtype, "max_pool_backward", "CPU", [&]<class Index>() {
      sum_by_channels<T>(dx, voxels, [&](auto& sums, int64_t i) {
        const T* in = channel_data<const T>(dy, i);
        const Index* index = channel_data<const Index>(indices, i);
        for (int64_t d = 0; d < dy.size[2]; ++d)
          for (int64_t h = 0; h < dy.size[3]; ++h)
            for (int64_t w = 0; w < dy.size[4]; ++w) {
              const int64_t at = index[d * indices.stride[2] + h * indices.stride[3] + w * indices.stride[4]];
              if (at >= 0) sums[static_cast<size_t>(at)] += in[d * dy.stride[2] + h * dy.stride[3] + w * dy.stride[4]];
            }
      });
    });
  });
}

}  // namespace voxgrad::cpu
