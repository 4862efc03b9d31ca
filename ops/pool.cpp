// Pooling. Signals and images are computed as volumes with leading spatial axes of size 1.
//
// Average pooling is a linear map along each axis; one kernel applies all three, and the gradient is the transposed
// map. Maximum pooling saves the indices of the maxima: its gradient scatters to these indices, and the gradient of the
// gradient gathers from them.
#include "ops/pool.h"

#include <algorithm>

#include "core/detail/divide.h"
#include "ops/detail/common.h"
#include "ops/detail/conv_geometry.h"

namespace voxgrad {
namespace {

void check_input(const char* op, const Tensor& x, int64_t axes) {
  constexpr const char* kForms[] = {"(N, C, L) or (C, L)", "(N, C, H, W) or (C, H, W)",
                                    "(N, C, D, H, W) or (C, D, H, W)"};
  check_floating(op, x);
  check(x.dim() == axes + 2 || x.dim() == axes + 1, op, "input must be ", kForms[axes - 1], ", got ", describe(x));
  check_axes(op, x, axes);
}

/// The options of a pooling function for any number of spatial axes.
struct Windows {
  Dims kernel_size, stride;
  Dims padding;
  bool ceil_mode;
  Dims dilation = Dims::filled(kernel_size.size(), 1);

  int64_t axes() const { return stride.size(); }
};

void check_windows(const char* op, const Windows& w) {
  check_extent(op, "kernel_size", w.kernel_size, 1);
  check_extent(op, "stride", w.stride, 1);
  check_extent(op, "dilation", w.dilation, 1);
  for (int64_t i = 0; i < w.axes(); ++i)
    check(w.padding[i] >= 0 && w.padding[i] <= w.kernel_size[i] / 2, op,
          "padding must lie between 0 and half of kernel_size ", w.kernel_size, ", got ", w.padding);
}

/// Throws if a window of spatial axis i contains only padding. A dilated window can step over a small input, and the
/// maximum of such a window would be undefined. `axis`: the axis of the input; `in` and `out`: the sizes of the input
/// and the result.
void check_not_empty(const char* op, const Windows& w, int64_t i, int64_t axis, int64_t in, int64_t out) {
  const int64_t k = w.kernel_size[i], d = w.dilation[i], p = w.padding[i];
  if (d == 1 || p == 0) return;
  for (int64_t o = 0; o < out; ++o) {
    const int64_t start = o * w.stride[i] - p;
    const int64_t first = start < 0 ? start + round_up(-start, d) : start;
    check(first <= start + (k - 1) * d && first < in, op, "a window along axis ", axis, " contains only padding (size ",
          in, ", kernel_size ", k, ", padding ", p, ", dilation ", d, ')');
    if (start >= 0) o = std::max(o, out - 2);  // check only the last of the windows that begin inside the input
  }
}

/// Checks the options and x, which may have no batch axis. Returns the spatial size of the result.
Triple pooled_size(const char* op, const Windows& w, const Tensor& x) {
  check_windows(op, w);
  check_input(op, x, w.axes());
  Dims size;
  for (int64_t i = 0; i < w.axes(); ++i) {
    const int64_t axis = x.dim() - w.axes() + i, in = x.size(axis), stride = w.stride[i];
    size.push_back(
        conv_output_size(in + (w.ceil_mode ? stride - 1 : 0), w.kernel_size[i], stride, w.padding[i], w.dilation[i]));
    check(size[i] > 0, op, "the window is larger than the padded input ", x.shape(), ": the result would have ",
          size[i], " elements along axis ", axis, " with kernel_size ", w.kernel_size, ", stride ", w.stride,
          ", padding ", w.padding, ", dilation ", w.dilation);
    // In ceil mode, drop the last window if it would begin in the padding after the input.
    if (w.ceil_mode && (size[i] - 1) * stride >= in + w.padding[i]) --size[i];
    check_not_empty(op, w, i, axis, in, size[i]);
  }
  if (w.axes() == 3)
    check_within_slab(op, w.dilation[0] * (w.kernel_size[0] - 1) < w.stride[0] && w.padding[0] == 0 &&
                              x.size(x.dim() - 3) % w.stride[0] == 0);
  return to_triple(size, 1);
}

/// Returns zeros (N, C, size...) with the values of y added at `indices`.
Tensor max_unpool(const Tensor& y, const Tensor& indices, const Triple& size, const PoolGeometry& geometry) {
  const Tensor x = empty_volume(y, y.size(1), size, y.dtype());
  kernels(y.device()).max_pool_backward(x.view_out(), y.view_in(), indices.view_in(), geometry);
  return record("max_unpool", x, {y}, [indices = Saved(indices), shape = y.shape()](const Tensor& grad) {
    return Tensors{reshape(gather(flatten(grad, 2), 2, flatten(indices().to(i64), 2)), shape)};
  });
}

/// Computes maximum pooling of volumes (N, C, D, H, W). The indices are i32 if the volume has fewer than 2^31 voxels,
/// otherwise i64. The indices are undefined if neither the caller (`return_indices`) nor the gradient needs them.
MaxPoolResult max_pool(const Tensor& x, const PoolGeometry& geometry, const Triple& pooled, bool return_indices) {
  const Tensor y = empty_volume(x, x.size(1), pooled, x.dtype());
  const Triple size = spatial_size(x);
  Tensor indices;
  if (return_indices || needs_grad({x})) {
    const double voxels = static_cast<double>(size[0]) * static_cast<double>(size[1]) * static_cast<double>(size[2]);
    indices = empty_volume(x, x.size(1), pooled, voxels < 0x1p31 ? i32 : i64);
  }
  kernels(x.device()).max_pool(y.view_out(), OptionalView(indices, true), x.view_in(), geometry);
  record("max_pool", y, {x}, [indices = Saved(indices), size, geometry](const Tensor& grad) {
    return Tensors{max_unpool(grad, indices(), size, geometry)};
  });
  return {y, indices};
}

/// Checks the arguments and computes maximum pooling. The result has the axes of x.
MaxPoolResult max_pool(const char* op, const Windows& w, const Tensor& x, bool return_indices) {
  const Triple size = pooled_size(op, w, x);
  const PoolGeometry geometry{to_triple(w.kernel_size, 1), to_triple(w.stride, 1), to_triple(w.padding, 0),
                              to_triple(w.dilation, 1)};
  const MaxPoolResult result = max_pool(as_volume(x, w.axes()), geometry, size, return_indices);
  const bool batched = x.dim() == w.axes() + 2;
  return {from_volume(result.output, w.axes(), batched),
          return_indices ? from_volume(result.indices.to(i64), w.axes(), batched) : Tensor()};
}

template <class Options>
Windows windows_of(const Options& o) {
  Windows w{Dims(o.kernel_size.values), Dims(o.stride.value_or(o.kernel_size).values), Dims(o.padding.values),
            o.ceil_mode};
  if constexpr (requires { o.dilation; }) w.dilation = Dims(o.dilation.values);
  return w;
}

template <int N>
Tensor avg_pool(const char* op, const Tensor& x, const AvgPoolOptions<N>& o) {
  const Windows w = windows_of(o);
  const std::optional<int64_t> divisor = o.divisor_override;
  o.validate(op);
  const Triple size = pooled_size(op, w, x);
  ResampleMaps maps;
  for (int64_t i = 0; i < N; ++i) {
    Resample& box = maps[static_cast<size_t>(i + 3 - N)];
    box = {.mode = Resample::Mode::box, .count_include_pad = o.count_include_pad};
    box.kernel = w.kernel_size[i];
    box.stride = w.stride[i];
    box.padding = w.padding[i];
    if (divisor) box.weight = i == 0 ? 1 / static_cast<double>(*divisor) : 1;
  }
  return resample_axes(x, N, maps, size);
}

// ---- adaptive pooling

void check_adaptive(const char* op, const Tensor& x, const Dims& size) {
  check_extent(op, "output_size", size, 1);
  check_input(op, x, size.size());
  check_within_slab(op, size.size() < 3);
  for (int64_t i = x.dim() - size.size(); i < x.dim(); ++i)
    check(x.size(i) < int64_t{1} << 31, op, "input has an axis of 2^31 or more elements: ", x.shape());
}

Tensor adaptive_avg_pool(const char* op, const Tensor& x, const Dims& size) {
  check_adaptive(op, x, size);
  ResampleMaps maps;
  for (int64_t i = 0; i < size.size(); ++i) {
    Resample& map = maps[static_cast<size_t>(i + 3 - size.size())];
    map = {.mode = Resample::Mode::adaptive, .count_include_pad = false};
    map.outputs = size[i];
  }
  return resample_axes(x, size.size(), maps, to_triple(size, 1));
}

/// Computes adaptive maximum pooling with max_pool, which requires windows of equal length. If the lengths differ,
/// copies the inputs such that each shorter window repeats its last input.
Tensor adaptive_max_pool(const char* op, const Tensor& x, const Dims& size) {
  check_adaptive(op, x, size);
  Tensor padded = x;
  Dims kernel;
  for (int64_t i = 0; i < size.size(); ++i) {
    const int64_t axis = x.dim() - size.size() + i, in = x.size(axis), out = size[i];
    const auto begin = [&](int64_t o) { return o * in / out; };
    const auto end = [&](int64_t o) { return divide_up((o + 1) * in, out); };
    kernel.push_back(in / out);
    if (in % out == 0) continue;
    for (int64_t o = 0; o < out; ++o) kernel[i] = std::max(kernel[i], end(o) - begin(o));
    std::vector<int64_t> taken;
    for (int64_t o = 0; o < out; ++o)
      for (int64_t k = 0; k < kernel[i]; ++k) taken.push_back(std::min(begin(o) + k, end(o) - 1));
    padded = index_select(padded, axis, from_span<int64_t>(taken, {static_cast<int64_t>(taken.size())}, x.device()));
  }
  const Dims none = Dims::filled(size.size(), 0);
  return max_pool(op, {kernel, kernel, none, false}, padded, false).output;
}

}  // namespace

template <int N>
void MaxPoolOptions<N>::validate(const char* op) const {
  check_windows(op, windows_of(*this));
}
template <int N>
void AvgPoolOptions<N>::validate(const char* op) const {
  check_windows(op, windows_of(*this));
  check(!divisor_override || *divisor_override != 0, op, "divisor_override must not be zero");
}

/// Defines the public functions for N spatial axes; D is the suffix of their names.
#define VG_DEFINE(N, D)                                                                                     \
  template struct MaxPoolOptions<N>;                                                                        \
  template struct AvgPoolOptions<N>;                                                                        \
  Tensor max_pool##D(const Tensor& x, const MaxPoolOptions<N>& o) {                                         \
    return max_pool("max_pool" #D, windows_of(o), x, false).output;                                         \
  }                                                                                                         \
  MaxPoolResult max_pool##D##_with_indices(const Tensor& x, const MaxPoolOptions<N>& o) {                   \
    return max_pool("max_pool" #D, windows_of(o), x, true);                                                 \
  }                                                                                                         \
  Tensor avg_pool##D(const Tensor& x, const AvgPoolOptions<N>& o) { return avg_pool("avg_pool" #D, x, o); } \
  Tensor adaptive_avg_pool##D(const Tensor& x, const Extent<N>& size) {                                     \
    return adaptive_avg_pool("adaptive_avg_pool" #D, x, size.values);                                       \
  }                                                                                                         \
  Tensor adaptive_max_pool##D(const Tensor& x, const Extent<N>& size) {                                     \
    return adaptive_max_pool("adaptive_max_pool" #D, x, size.values);                                       \
  }
VG_DEFINE(1, 1d)
VG_DEFINE(2, 2d)
VG_DEFINE(3, 3d)
#undef VG_DEFINE

}  // namespace voxgrad
