// Implements the sources of volumes and the functions that prepare them.
#include "examples/superres/volume.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace superres {
namespace vg = voxgrad;
namespace {

constexpr int64_t kMinSize = 64;

/// Crops the axes to even sizes, replaces values that are not finite by 0, and scales the intensities to [0, 1].
void prepare(Volume& volume) {
  vg::Tensor& data = volume.image.data;
  for (int64_t axis = 0; axis < 3; ++axis) {
    vg::check(data.size(axis) >= kMinSize, "superres", volume.name, " has shape ", data.shape(),
              "; each axis needs at least ", kMinSize, " voxels");
    data = data.narrow(axis, 0, data.size(axis) / 2 * 2);
  }
  data = vg::where(vg::isfinite(data), data, vg::zeros_like(data));
  const double low = vg::amin(data).item(), high = vg::amax(data).item();
  vg::check(high > low, "superres", volume.name, ": all voxels have the same value");
  // Air is 0 in most scans. If a scan has negative values, shift it so that its minimum becomes 0.
  const double floor = std::min(low, 0.0);
  data = vg::affine(data, 1 / (high - floor), -floor / (high - floor)).contiguous();
}

}  // namespace

Volume load_volume(const std::filesystem::path& path) {
  Volume volume{path.filename().string(), false, vg::load_nifti(path)};
  vg::check(volume.image.data.dim() == 3 || volume.image.data.dim() == 4, "superres", volume.name,
            " is not a volume: its shape is ", volume.image.data.shape());
  if (volume.image.data.dim() == 4) volume.image.data = volume.image.data.select(0, 0);
  volume.image = upright(volume.image);
  prepare(volume);
  return volume;
}

vg::NiftiImage upright(const vg::NiftiImage& image) {
  const auto& from = image.affine;
  // Returns the cosine of the angle between an axis of world space and an axis of the file.
  const auto cosine = [&](size_t world, size_t axis) {
    const double length = std::hypot(from[0][axis], from[1][axis], from[2][axis]);
    return length > 0 ? from[world][axis] / length : 0;
  };
  using Order = std::array<size_t, 3>;
  const auto fit = [&](const Order& order) {
    return std::abs(cosine(0, order[0])) + std::abs(cosine(1, order[1])) + std::abs(cosine(2, order[2]));
  };
  Order order{0, 1, 2}, best = order;  // best[i]: axis of the file that becomes axis i
  while (std::next_permutation(order.begin(), order.end()))
    if (fit(order) > fit(best)) best = order;

  vg::NiftiImage to = image;
  const auto dim = [](size_t axis) { return 2 - static_cast<int64_t>(axis); };  // D, H, W are axes 2, 1, 0 of the file
  to.data = image.data.permute({dim(best[2]), dim(best[1]), dim(best[0])});
  for (size_t axis = 0; axis < 3; ++axis) {
    const bool mirrored = cosine(axis, best[axis]) < 0;
    if (mirrored) to.data = vg::flip(to.data, {dim(axis)});
    const double last = static_cast<double>(to.data.size(dim(axis)) - 1);
    for (size_t row = 0; row < 3; ++row) {
      const double step = from[row][best[axis]];
      to.affine[row][axis] = mirrored ? -step : step;
      if (mirrored) to.affine[row][3] += step * last;
    }
    to.spacing[2 - axis] = image.spacing[2 - best[axis]];
  }
  return to;
}

Volume make_phantom(int64_t size) {
  vg::check(size >= kMinSize && size <= 512, "superres", "the phantom's size must lie in [", kMinSize, ", 512], got ",
            size);
  // Each row: intensity to add; semi-axes a, b, c; center x, y, z; rotation about z in degrees. Coordinates in the
  // volume are from -1 to 1.
  static constexpr std::array<std::array<double, 8>, 10> kEllipsoids{{
      {1.0, .6900, .920, .810, 0, 0, 0, 0},
      {-.8, .6624, .874, .780, 0, -.0184, 0, 0},
      {-.2, .1100, .310, .220, .22, 0, 0, -18},
      {-.2, .1600, .410, .280, -.22, 0, 0, 18},
      {.1, .2100, .250, .410, 0, .35, -.15, 0},
      {.1, .0460, .046, .050, 0, .1, .25, 0},
      {.1, .0460, .046, .050, 0, -.1, .25, 0},
      {.1, .0460, .023, .050, -.08, -.605, 0, 0},
      {.1, .0230, .023, .020, 0, -.606, 0, 0},
      {.1, .0230, .046, .020, .06, -.605, 0, 0},
  }};
  constexpr double kDegree = 3.14159265358979323846 / 180;
  Volume volume{"Shepp-Logan phantom", true, {}};
  volume.image.data = vg::zeros({size, size, size});
  volume.image.descrip = "3-D Shepp-Logan phantom";
  float* out = volume.image.data.mutable_data<float>();
  const auto position = [&](int64_t i) { return (static_cast<double>(i) + 0.5) * 2 / static_cast<double>(size) - 1; };
  for (int64_t d = 0; d < size; ++d)
    for (int64_t h = 0; h < size; ++h)
      for (int64_t w = 0; w < size; ++w) {
        double value = 0;
        for (const auto& [intensity, a, b, c, x0, y0, z0, phi] : kEllipsoids) {
          const double x = position(w) - x0, y = position(h) - y0, z = position(d) - z0;
          const double u = x * std::cos(phi * kDegree) + y * std::sin(phi * kDegree);
          const double v = -x * std::sin(phi * kDegree) + y * std::cos(phi * kDegree);
          if (u * u / (a * a) + v * v / (b * b) + z * z / (c * c) <= 1) value += intensity;
        }
        out[(d * size + h) * size + w] = static_cast<float>(std::max(value, 0.0));
      }
  prepare(volume);
  return volume;
}

vg::Tensor low_resolution(const vg::Tensor& high) { return vg::avg_pool3d(high, {.kernel_size = 2}); }

vg::Tensor slab(const Volume& volume, int64_t start, int64_t stop) {
  return volume.data().narrow(0, start, stop - start).unsqueeze(0).unsqueeze(0).contiguous();
}

}  // namespace superres
