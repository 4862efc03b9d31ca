// Interpolation, and the function resample() that interpolation, pooling and padding share. One kernel applies a linear
// map along each axis. The gradient applies the transposed maps.
#include "ops/interpolate.h"

#include <algorithm>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

constexpr const char* kOp = "interpolate";

struct ModeRow {
  const char* name;
  Resample::Mode map;
  int64_t axes;  // number of spatial axes that the mode requires; 0: any number
};
const ModeRow& row_of(InterpolateMode mode) {
  using enum Resample::Mode;
  static constexpr ModeRow rows[] = {{"nearest", nearest, 0}, {"nearest_exact", nearest_exact, 0},
                                     {"linear", linear, 1},   {"bilinear", linear, 2},
                                     {"bicubic", cubic, 2},   {"trilinear", linear, 3}};
  return rows[static_cast<size_t>(mode)];
}

void check_input(const Tensor& x, const InterpolateOptions& options) {
  check_floating(kOp, x);
  check_batched(kOp, x);
  const int64_t axes = x.dim() - 2, required = row_of(options.mode).axes;
  constexpr const char* kForms[] = {"any", "(N, C, L)", "(N, C, H, W)", "(N, C, D, H, W)"};
  check(required == 0 || required == axes, kOp, "mode ", options.mode, " requires an input ", kForms[required],
        ", got shape ", x.shape());
  check_axes(kOp, x, axes);
  const int64_t given = options.size ? options.size->values.size() : options.scale_factor->count;
  check(given == 1 || given == axes, kOp, options.size ? "size" : "scale_factor", " has ", given,
        " values, but the number of spatial axes of input ", x.shape(), " is ", axes);
}

Dims result_size(const Tensor& x, const InterpolateOptions& options) {
  Dims size;
  for (int64_t i = 0; i < x.dim() - 2; ++i) {
    if (options.size) {
      const Dims& given = options.size->values;
      size.push_back(given[given.size() == 1 ? 0 : i]);
      continue;
    }
    const double exact = std::floor(static_cast<double>(x.size(i + 2)) * (*options.scale_factor)[i]);
    check(exact < 9e18, kOp, "scale_factor ", *options.scale_factor, " makes the result of input ", x.shape(),
          " too large");
    size.push_back(static_cast<int64_t>(exact));
  }
  for (int64_t length : size)
    check(length > 0, kOp, "the result must have at least one voxel along each axis, size is ", size, " for input ",
          x.shape());
  return size;
}

/// Returns the distance between neighboring outputs along spatial axis `axis`, in units of input positions. The
/// value is computed as in PyTorch.
double step_of(const InterpolateOptions& options, int64_t axis, int64_t in, int64_t out) {
  if (options.align_corners) return out > 1 ? static_cast<double>(in - 1) / static_cast<double>(out - 1) : 0;
  return options.scale_factor ? 1 / (*options.scale_factor)[axis] : static_cast<double>(in) / static_cast<double>(out);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, InterpolateMode mode) { return out << row_of(mode).name; }

std::ostream& operator<<(std::ostream& out, const ScaleFactor& s) {
  const double first = s[0];
  if (std::all_of(s.values.begin(), s.values.begin() + s.count, [&](double value) { return value == first; }))
    return out << first;
  for (int64_t i = 0; i < s.count; ++i) out << (i == 0 ? "[" : ", ") << s[i];
  return out << ']';
}

void InterpolateOptions::validate(const char* op) const {
  check(size.has_value() != scale_factor.has_value(), op, "exactly one of size and scale_factor must be given");
  check(row_of(mode).map >= Resample::Mode::linear || !align_corners, op, "align_corners must be false for mode ",
        mode);
  if (size)
    for (int64_t length : size->values) check(length > 0, op, "size must be positive, got ", size->values);
  for (int64_t i = 0; scale_factor && i < scale_factor->count; ++i)
    check(std::isfinite((*scale_factor)[i]) && (*scale_factor)[i] > 0, op,
          "scale_factor must be finite and positive, got ", *scale_factor);
}

Tensor interpolate(const Tensor& x, const InterpolateOptions& options) {
  options.validate(kOp);
  check_input(x, options);
  const Dims size = result_size(x, options);
  const int64_t axes = size.size();
  if (axes == 3) {
    // If the volume is divided among ranks along D, two cases are supported: D does not change, or all planes are
    // repeated the same whole number of times.
    const bool same = size[0] == x.size(2) && (!options.scale_factor || (*options.scale_factor)[0] == 1);
    const bool repeats =
        size[0] % x.size(2) == 0 && row_of(options.mode).map < Resample::Mode::linear &&
        (!options.scale_factor || (*options.scale_factor)[0] == std::floor((*options.scale_factor)[0]));
    check_within_slab(kOp, same || repeats);
  }
  const bool cubic = options.mode == InterpolateMode::bicubic;
  ResampleMaps maps;
  bool same = true;
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t in = x.size(i + 2);
    if (in == size[i] && !cubic) continue;
    same = false;
    maps[static_cast<size_t>(i + 3 - axes)] = {.mode = row_of(options.mode).map,
                                               .align_corners = options.align_corners,
                                               .scale = step_of(options, i, in, size[i])};
  }
  return same ? x.clone() : resample_axes(x, axes, maps, to_triple(size, 1));
}

Tensor resample(const Tensor& x, const ResampleMaps& maps, const Triple& size, bool transposed) {
  const Tensor y = empty_volume(x, x.size(1), size, x.dtype());
  kernels(x.device()).resample(y.view_out(), x.view_in(), maps, transposed);
  return record("resample", y, {x}, [=, from = spatial_size(x)](const Tensor& grad) {
    return Tensors{resample(grad, maps, from, !transposed)};
  });
}

}  // namespace voxgrad
