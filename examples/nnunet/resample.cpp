// Implements nnU-Net's resampling of images and logits.
#include "examples/nnunet/resample.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace nnunet {

using namespace voxgrad;

namespace {

/// Returns the position in the input, in voxels, of output voxel `i` along an axis.
double source_position(int64_t i, int64_t in, int64_t out) {
  return (static_cast<double>(i) + 0.5) * static_cast<double>(in) / static_cast<double>(out) - 0.5;
}

/// Replaces samples by the coefficients of the cubic B-spline that interpolates them and is symmetric about the outer
/// faces (Unser, "Splines: a perfect fit for signal and image processing", 1999).
void spline_coefficients(std::vector<double>& c) {
  const double pole = std::sqrt(3.0) - 2;
  const size_t n = c.size();
  const double all = std::pow(pole, static_cast<double>(n));
  double sum = 0, power = pole;
  for (size_t i = 0; i < n; ++i, power *= pole) sum += power * (c[i] + all * c[n - 1 - i]);
  c[0] += sum / (1 - all * all);
  for (size_t i = 1; i < n; ++i) c[i] += pole * c[i - 1];
  c[n - 1] *= pole / (pole - 1);
  for (size_t i = n - 1; i-- > 0;) c[i] = pole * (c[i + 1] - c[i]);
  for (double& value : c) value *= (1 - pole) * (1 - 1 / pole);
}

/// Returns the matrix (out, in) of cubic spline interpolation along an axis. As in scikit-image, the axis is extended
/// by 12 copies of the outer values on each side before the coefficients are computed.
std::vector<double> cubic_matrix(int64_t in, int64_t out) {
  constexpr int64_t kPad = 12;
  std::vector<double> matrix(static_cast<size_t>(out * in)), unit(static_cast<size_t>(in + 2 * kPad));
  for (int64_t j = 0; j < in; ++j) {
    for (int64_t i = 0; i < std::ssize(unit); ++i) unit[i] = std::clamp<int64_t>(i - kPad, 0, in - 1) == j ? 1 : 0;
    spline_coefficients(unit);
    for (int64_t o = 0; o < out; ++o) {
      const double position = source_position(o, in, out) + kPad, first = std::floor(position), t = position - first;
      const double weights[] = {(1 - t) * (1 - t) * (1 - t) / 6, (4 - 6 * t * t + 3 * t * t * t) / 6,
                                (1 + 3 * t + 3 * t * t - 3 * t * t * t) / 6, t * t * t / 6};
      double& sum = matrix[o * in + j];
      for (int64_t k = 0; k < 4; ++k) sum += weights[k] * unit[static_cast<int64_t>(first) - 1 + k];
    }
  }
  return matrix;
}

/// Returns the matrix (out, in) of linear interpolation or, for order 0, of the nearest voxel.
std::vector<double> linear_matrix(int64_t in, int64_t out, int order) {
  std::vector<double> matrix(static_cast<size_t>(out * in));
  for (int64_t o = 0; o < out; ++o) {
    double position = source_position(o, in, out);
    if (order == 0) position = std::floor(position + 0.5);
    position = std::clamp(position, 0.0, static_cast<double>(in - 1));
    const auto low = static_cast<int64_t>(position);
    matrix[o * in + low] += 1 - (position - static_cast<double>(low));
    matrix[o * in + std::min(low + 1, in - 1)] += position - static_cast<double>(low);
  }
  return matrix;
}

/// Resizes an axis of x (D, H, W) f64.
Tensor resize_axis(const Tensor& x, int64_t axis, int64_t out, int order) {
  const int64_t in = x.size(axis);
  if (in == out) return x;
  const std::vector<double> values = order == 3 ? cubic_matrix(in, out) : linear_matrix(in, out, order);
  const Tensor matrix = from_span<double>(values, {out, in}, x.device());
  if (axis == 1) return matmul(matrix, x);
  if (axis == 2) return matmul(x, transpose(matrix, 0, 1));
  return reshape(matmul(matrix, reshape(x, {in, -1})), {out, x.size(1), x.size(2)});
}

Tensor clip(const Tensor& x, const Tensor& low, const Tensor& high) { return minimum(maximum(x, low), high); }

}  // namespace

std::optional<int64_t> separate_axis(const ResampleOptions& options, const Spacing& current, const Spacing& target) {
  const auto anisotropic = [](const Spacing& s) { return std::ranges::max(s) / std::ranges::min(s) > 3; };
  const bool use_current = options.force_separate_z.value_or(false) || anisotropic(current);
  if (!options.force_separate_z.value_or(anisotropic(current) || anisotropic(target))) return {};
  const Spacing& spacing = use_current ? current : target;
  const auto largest = std::ranges::max_element(spacing);
  if (std::ranges::count(spacing, *largest) > 1) return {};
  return largest - spacing.begin();
}

Dims resampled_size(const Shape& size, const Spacing& current, const Spacing& target) {
  Dims result;
  for (size_t i = 0; i < 3; ++i) {
    const double voxels = std::nearbyint(current[i] / target[i] * static_cast<double>(size[static_cast<int64_t>(i)]));
    check(voxels >= 1 && voxels <= 32767, "resample", "spacing ", current[i], " -> ", target[i], " mm changes axis ", i,
          " of ", size, " to ", voxels, " voxels; expected 1 to 32767");
    result.push_back(static_cast<int64_t>(voxels));
  }
  return result;
}

Tensor resample(const Tensor& x, const Dims& size, int order, std::optional<int64_t> axis) {
  Tensors channels;
  if (x.size(1) == size[0] && x.size(2) == size[1] && x.size(3) == size[2]) return x;
  for (int64_t c = 0; c < x.size(0); ++c) {
    Tensor y = x.select(0, c).to(f64).contiguous();
    Axes reduced;  // all axes except the separate axis; each slice along the separate axis is clipped to its own range
    for (int64_t a = 0; a < 3; ++a)
      if (a != axis) reduced.push_back(a);
    const Tensor low = amin(y, reduced, true), high = amax(y, reduced, true);
    for (const int64_t a : reduced) y = resize_axis(y, a, size[a], order);
    y = clip(y, low, high);
    if (axis) y = resize_axis(y, *axis, size[*axis], 0);
    channels.push_back(y.to(x.dtype()));
  }
  return stack(channels);
}

}  // namespace nnunet
