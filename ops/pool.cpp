// Pooling and resampling of volumes.
//
// Averages and interpolation are linear and separate into axes: each is `resample` along one axis after the
// other, whose gradient is the transposed map. A maximum is a choice: its gradient puts values back where the
// indices point, and the gradient of that picks them from there.
#include "ops/pool.h"

#include "core/autograd.h"
#include "ops/checks.h"
#include "ops/conv_geometry.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/kernels.h"
#include "ops/shape.h"
#include "ops/volume.h"

namespace voxgrad {
namespace {

constexpr int kFirstSpatial = 2;

void check_axes(const char* op, const Tensor& x) {
  for (int64_t i = x.dim() - 4; i < x.dim(); ++i) {
    check(x.size(i) > 0, op, "input has an empty axis other than the batch: ", x.shape());
    check(x.size(i) <= int64_t{1} << 62, op, "input has an axis of more than 2^62: ", x.shape());
  }
}

/// The linear map along `axis` to `size` outputs, or its transpose (where `size` is that of the map's input).
Tensor resample(const Tensor& x, int64_t axis, const Resample& map, int64_t size, bool transposed = false) {
  Triple sizes = spatial_size(x);
  sizes[static_cast<int>(axis) - kFirstSpatial] = size;
  const Tensor y = empty_volume(x, x.size(1), sizes, x.dtype());
  kernels(x.device()).resample(y.view_out(), x.view_in(), static_cast<int>(axis), map, transposed);
  return record("resample", y, {x}, [=, n = x.size(axis)](const Tensor& grad) {
    return Tensors{resample(grad, axis, map, n, !transposed)};
  });
}

// ---- pooling

struct Windows {
  Triple kernel_size, stride, padding, dilation;
  bool ceil_mode;
};

void check_windows(const char* op, const Windows& w) {
  check_extent(op, "kernel_size", Dims(w.kernel_size.values), 1);
  check_extent(op, "stride", Dims(w.stride.values), 1);
  check_extent(op, "dilation", Dims(w.dilation.values), 1);
  for (int i = 0; i < 3; ++i)
    check(w.padding[i] >= 0 && w.padding[i] <= w.kernel_size[i] / 2, op,
          "padding must lie between 0 and half of kernel_size ", w.kernel_size, ", got ", w.padding);
}

/// Dilated windows can step over a small input altogether and would have no maximum.
void check_not_empty(const char* op, const Windows& w, const Tensor& x, int axis, int64_t out) {
  const int64_t k = w.kernel_size[axis], d = w.dilation[axis], p = w.padding[axis], in = x.size(x.dim() - 3 + axis);
  if (d == 1 || p == 0) return;
  for (int64_t o = 0; o < out; ++o) {
    const int64_t start = o * w.stride[axis] - p;
    const int64_t first = start < 0 ? start + (-start + d - 1) / d * d : start;
    check(first <= start + (k - 1) * d && first < in, op, "a window along axis ", x.dim() - 3 + axis,
          " holds padding only (size ", in, ", kernel_size ", k, ", padding ", p, ", dilation ", d, ')');
    if (start >= 0) o = std::max(o, out - 2);  // of the windows that begin inside, the last is the one to look at
  }
}

/// Checks x, which may lack its batch.
Triple pooled_size(const char* op, const Windows& w, const Tensor& x) {
  check_defined(op, "input", x);
  check_floating(op, x);
  check(x.dim() == 5 || x.dim() == 4, op, "input must be (N, C, D, H, W) or (C, D, H, W), got ", describe(x));
  check_axes(op, x);
  Triple size(0);
  for (int i = 0; i < 3; ++i) {
    const int64_t axis = x.dim() - 3 + i, in = x.size(axis), stride = w.stride[i];
    size[i] =
        conv_output_size(in + (w.ceil_mode ? stride - 1 : 0), w.kernel_size[i], stride, w.padding[i], w.dilation[i]);
    check(size[i] > 0, op, "the window is larger than the padded input ", x.shape(), ": the result would have ",
          size[i], " elements along axis ", axis, " with kernel_size ", w.kernel_size, ", stride ", w.stride,
          ", padding ", w.padding, ", dilation ", w.dilation);
    // A last window that would begin in the padding behind the input is left out.
    if (w.ceil_mode && (size[i] - 1) * stride >= in + w.padding[i]) --size[i];
    check_not_empty(op, w, x, i, size[i]);
  }
  return size;
}

/// Runs `map` on x with a batch axis, which an unbatched (C, D, H, W) is given for the time.
template <class Map>
Tensor batched(const Tensor& x, Map map) {
  return x.dim() == 5 ? map(x) : squeeze(map(unsqueeze(x, 0)), 0);
}

/// Zeros of `size`, with the values of `y` added at `indices`.
Tensor max_unpool(const Tensor& y, const Tensor& indices, const Triple& size, const PoolGeometry& geometry) {
  const Tensor x = empty_volume(y, y.size(1), size, y.dtype());
  kernels(y.device()).max_pool_backward(x.view_out(), y.view_in(), indices.view_in(), geometry);
  return record("max_unpool", x, {y}, [indices = Saved(indices), shape = y.shape()](const Tensor& grad) {
    return Tensors{reshape(gather(flatten(grad, 2), 2, flatten(indices().to(i64), 2)), shape)};
  });
}

/// The indices are i32 where the volume allows it, and undefined if neither the caller nor the gradient wants them.
MaxPoolResult max_pool(const Tensor& x, const Windows& w, const Triple& pooled, bool want_indices) {
  const Tensor y = empty_volume(x, x.size(1), pooled, x.dtype());
  const PoolGeometry geometry{w.kernel_size, w.stride, w.padding, w.dilation};
  const Triple size = spatial_size(x);
  Tensor indices;
  View view;
  if (want_indices || needs_grad({x})) {
    const double voxels = static_cast<double>(size[0]) * static_cast<double>(size[1]) * static_cast<double>(size[2]);
    indices = empty_volume(x, x.size(1), pooled, voxels < 0x1p31 ? i32 : i64);
    view = indices.view_out();
  }
  kernels(x.device()).max_pool(y.view_out(), indices.defined() ? &view : nullptr, x.view_in(), geometry);
  record("max_pool3d", y, {x},
         [indices = indices.defined() ? Saved(indices) : Saved(), size, geometry](const Tensor& grad) {
           return Tensors{max_unpool(grad, indices(), size, geometry)};
         });
  return {y, indices};
}

/// How many inputs each window along one axis holds, times `scale`, shaped to broadcast over a volume.
Tensor window_counts(const Windows& w, int axis, int64_t in, int64_t out, double scale, TensorOptions options) {
  std::vector<double> counts;
  for (int64_t o = 0; o < out; ++o) {
    const int64_t start = o * w.stride[axis] - w.padding[axis];
    const int64_t end = std::min(start + w.kernel_size[axis], in);
    counts.push_back(scale * static_cast<double>(end - std::max<int64_t>(start, 0)));
  }
  Shape shape{1, 1, 1, 1, 1};
  shape[axis + kFirstSpatial] = out;
  return from_span<double>(counts, shape).to(options.device, options.dtype);
}

Tensor average(const Tensor& x, const Windows& w, const Triple& size, bool count_include_pad,
               std::optional<int64_t> divisor) {
  Tensor y = x;
  for (int i = 0; i < 3; ++i) {
    Resample box{.mode = Resample::Mode::box, .count_include_pad = count_include_pad && !divisor};
    box.kernel = w.kernel_size[i];
    box.stride = w.stride[i];
    box.padding = w.padding[i];
    y = resample(y, i + kFirstSpatial, box, size[i]);
    if (!divisor) continue;
    // Divided first, so that no product is larger than the result.
    const double scale = i == 0 ? 1 / static_cast<double>(*divisor) : 1;
    y = y * window_counts(w, i, x.size(i + kFirstSpatial), size[i], scale, x.options());
  }
  return y;
}

// ---- interpolation

Triple interpolated_size(const Tensor& x, const InterpolateOptions& options) {
  if (options.size) return *options.size;
  Triple size(0);
  for (int i = 0; i < 3; ++i) {
    const double exact = std::floor(static_cast<double>(x.size(i + kFirstSpatial)) * (*options.scale_factor)[i]);
    check(exact < 9e18, "interpolate", "scale_factor ", *options.scale_factor, " makes input ", x.shape(),
          " too large");
    size[i] = static_cast<int64_t>(exact);
  }
  return size;
}

/// Input positions to an output step, as PyTorch has it.
double step_of(const InterpolateOptions& options, int axis, int64_t in, int64_t out) {
  if (options.align_corners) return out > 1 ? static_cast<double>(in - 1) / static_cast<double>(out - 1) : 0;
  return options.scale_factor ? 1 / (*options.scale_factor)[axis] : static_cast<double>(in) / static_cast<double>(out);
}

Windows windows_of(const MaxPoolOptions& o) {
  return {o.kernel_size, o.stride.value_or(o.kernel_size), o.padding, o.dilation, o.ceil_mode};
}

Windows windows_of(const AvgPoolOptions& o) {
  return {o.kernel_size, o.stride.value_or(o.kernel_size), o.padding, Triple(1), o.ceil_mode};
}

}  // namespace

void MaxPoolOptions::validate(const char* op) const { check_windows(op, windows_of(*this)); }

void AvgPoolOptions::validate(const char* op) const {
  check_windows(op, windows_of(*this));
  check(!divisor_override || *divisor_override != 0, op, "divisor_override must not be zero");
}

void InterpolateOptions::validate(const char* op) const {
  check(size.has_value() != scale_factor.has_value(), op, "exactly one of size and scale_factor must be given");
  check(mode == InterpolateMode::trilinear || !align_corners, op, "align_corners is for trilinear mode only");
  for (int i = 0; i < 3; ++i) {
    check(!size || (*size)[i] > 0, op, "size must be positive, got ", size.value_or(0));
    check(!scale_factor || (std::isfinite((*scale_factor)[i]) && (*scale_factor)[i] > 0), op,
          "scale_factor must be finite and positive, got ", scale_factor.value_or(0));
  }
}

std::ostream& operator<<(std::ostream& out, const ScaleFactor& s) {
  if (s[0] == s[1] && s[1] == s[2]) return out << s[0];
  return out << '[' << s[0] << ", " << s[1] << ", " << s[2] << ']';
}

MaxPoolResult max_pool3d_with_indices(const Tensor& x, const MaxPoolOptions& options) {
  options.validate("max_pool3d");
  const Windows windows = windows_of(options);
  const Triple size = pooled_size("max_pool3d", windows, x);
  Tensor indices;
  const Tensor output = batched(x, [&](const Tensor& volume) {
    MaxPoolResult result = max_pool(volume, windows, size, true);
    indices = result.indices.to(i64);
    return result.output;
  });
  return {output, x.dim() == 5 ? indices : squeeze(indices, 0)};
}

Tensor max_pool3d(const Tensor& x, const MaxPoolOptions& options) {
  options.validate("max_pool3d");
  const Windows windows = windows_of(options);
  const Triple size = pooled_size("max_pool3d", windows, x);
  return batched(x, [&](const Tensor& volume) { return max_pool(volume, windows, size, false).output; });
}

Tensor avg_pool3d(const Tensor& x, const AvgPoolOptions& o) {
  o.validate("avg_pool3d");
  const Windows windows = windows_of(o);
  const Triple size = pooled_size("avg_pool3d", windows, x);
  return batched(
      x, [&](const Tensor& volume) { return average(volume, windows, size, o.count_include_pad, o.divisor_override); });
}

Tensor interpolate(const Tensor& x, const InterpolateOptions& options) {
  constexpr const char* kOp = "interpolate";
  options.validate(kOp);
  check_defined(kOp, "input", x);
  check_floating(kOp, x);
  check(x.dim() == 5, kOp, "input must be (N, C, D, H, W), got ", describe(x),
        "; unsqueeze(2) gives images (N, C, H, W) a depth of 1, unsqueeze(0) a volume (C, D, H, W) its batch");
  check_axes(kOp, x);
  const bool linear = options.mode == InterpolateMode::trilinear;
  const Triple size = interpolated_size(x, options);
  for (int i = 0; i < 3; ++i)
    check(size[i] > 0, kOp, "the result must have at least one voxel along each axis, size is ", size, " for input ",
          x.shape());
  Tensor y = x;
  for (int i = 0; i < 3; ++i) {
    const int64_t axis = i + kFirstSpatial, in = x.size(axis);
    const Resample map{.mode = linear ? Resample::Mode::linear : Resample::Mode::nearest,
                       .align_corners = options.align_corners,
                       .scale = step_of(options, i, in, size[i])};
    if (in != size[i]) y = resample(y, axis, map, size[i]);
  }
  return y.is_same(x) ? x.clone() : y;
}

}  // namespace voxgrad
