// Loads the images and labels of a case and checks their geometry and their values.
#include "examples/nnunet/case.h"

#include <algorithm>
#include <cmath>

namespace nnunet {

using namespace voxgrad;

namespace {

constexpr const char* kLoad = "load_case";

/// Returns the column of the affine that belongs to an axis of (D, H, W).
size_t column_of(int64_t axis) { return static_cast<size_t>(2 - axis); }

Geometry geometry_of(const std::filesystem::path& path, const Shape& shape, const NiftiImage& image) {
  check(shape.size() == 3, kLoad, "'", path.string(), "': expected one volume, got a series ", shape);
  Geometry g{shape, {}, image.affine};
  for (int64_t axis = 0; axis < 3; ++axis) {
    const size_t i = column_of(axis);
    const double length = std::hypot(g.affine[0][i], g.affine[1][i], g.affine[2][i]);
    check(length > 0, kLoad, "'", path.string(), "': the voxel-to-world matrix has a column of zeros");
    // The matrix has the precision of f32. Use the spacing of the header if the difference is a rounding error.
    const double spacing = image.spacing[static_cast<size_t>(axis)];
    g.spacing[static_cast<size_t>(axis)] = std::abs(length - spacing) < 1e-5 * length ? spacing : length;
  }
  return g;
}

/// Compares the positions of voxels with the same index in two geometries of the same shape. Returns an upper bound, in
/// mm, for the difference along any world axis.
double distance(const Geometry& a, const Geometry& b) {
  double maximum = 0;
  for (size_t row = 0; row < 3; ++row) {
    double sum = std::abs(a.affine[row][3] - b.affine[row][3]);
    for (int64_t axis = 0; axis < 3; ++axis)
      sum += std::abs(a.affine[row][column_of(axis)] - b.affine[row][column_of(axis)]) *
             static_cast<double>(a.shape[axis]);
    maximum = std::max(maximum, sum);
  }
  return maximum;
}

void check_same(const std::filesystem::path& path, const Geometry& g, const std::filesystem::path& first,
                const Geometry& expected) {
  check(g.shape == expected.shape, kLoad, "'", path.string(), "' has shape ", g.shape, ", '", first.string(), "' has ",
        expected.shape);
  const double apart = distance(g, expected);
  check(apart <= 0.1 * *std::min_element(g.spacing.begin(), g.spacing.end()), kLoad, "the voxels of '", path.string(),
        "' and of '", first.string(), "' lie up to ", apart, " mm apart: their affines differ");
}

/// Throws if `good` is false for a voxel.
template <class Good>
void check_voxels(const std::filesystem::path& path, const Tensor& voxels, Good good, const std::string& expected) {
  const float* data = voxels.data<float>();
  const int64_t count = voxels.numel(), i = std::find_if_not(data, data + count, good) - data;
  if (i == count) return;
  const int64_t h = voxels.size(1), w = voxels.size(2);
  const Dims place{i / (h * w), i / w % h, i % w};
  fail(kLoad, "'", path.string(), "': voxel ", place, " is ", data[i], ", ", expected);
}

/// Returns `voxels`. Throws if a voxel is not finite.
Tensor to_channel(const std::filesystem::path& path, const Tensor& voxels) {
  check_voxels(
      path, voxels, [](float v) { return std::isfinite(v); }, "not a finite number");
  return voxels;
}

/// Converts a label to u8. Throws if a voxel is neither a class number nor ignore_index.
Tensor to_classes(const std::filesystem::path& path, const Tensor& voxels, int64_t classes, int64_t ignore_index) {
  const auto end = static_cast<float>(classes), ignored = static_cast<float>(ignore_index);
  const bool ignores = ignore_index >= 0;
  check_voxels(
      path, voxels, [=](float v) { return (v >= 0 && v < end && v == std::floor(v)) || (ignores && v == ignored); },
      concat("expected a label from 0 to ", classes - 1,
             ignores ? concat(" or the ignored label ", ignore_index) : std::string()));
  return voxels.to(u8);
}

void check_classes(const std::string& name, size_t images, int64_t classes, int64_t ignore_index) {
  check(images > 0 && classes >= 2 && classes <= 256, kLoad, "'", name, "' has ", images,
        images == 1 ? " image" : " images", " and ", classes, classes == 1 ? " class" : " classes",
        "; expected at least one image and 2 to 256 classes");
  check(ignore_index < 256, kLoad, "'", name, "': labels are u8, so ignore_index must be less than 256, got ",
        ignore_index);
}

/// Returns true if a label value counts as foreground.
bool is_foreground(uint8_t number, int64_t ignore_index) { return number != 0 && number != ignore_index; }

void check_image(const char* op, const Tensor& image) {
  check(image.defined() && image.dim() == 4 && image.dtype() == f32 && image.numel() > 0, op,
        "expected an image (C, D, H, W) f32, got ", describe(image));
}

}  // namespace

Case load_case(const std::string& name, const std::vector<std::filesystem::path>& images,
               const std::filesystem::path& label, int64_t classes, int64_t ignore_index) {
  check_classes(name, images.size(), classes, ignore_index);
  Case c{name, {}, {}, {}};
  Tensors channels;
  for (const auto& path : images) {
    const NiftiImage image = load_nifti(path);
    const Geometry geometry = geometry_of(path, image.data.shape(), image);
    if (channels.empty()) c.geometry = geometry;
    check_same(path, geometry, images[0], c.geometry);
    channels.push_back(to_channel(path, image.data));
  }
  c.image = stack(channels);
  if (label.empty()) return c;
  const NiftiImage image = load_nifti(label);
  check_same(label, geometry_of(label, image.data.shape(), image), images[0], c.geometry);
  c.label = to_classes(label, image.data, classes, ignore_index);
  const auto* voxels = c.label.data<uint8_t>();
  const bool any = std::any_of(voxels, voxels + c.label.numel(),
                               [=](uint8_t number) { return is_foreground(number, ignore_index); });
  check(any, kLoad, "'", label.string(), "': there is nothing but background",
        ignore_index < 0 ? "" : " and ignored voxels");
  return c;
}

Tensor nonzero_mask(const Tensor& image) {
  check_image("nonzero_mask", image);
  return ne(amax(abs(image), 0), 0);
}

Box nonzero_box(const Tensor& image) {
  const Tensor mask = nonzero_mask(image).to(u8);
  Box box;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const auto some = amax(mask, axis == 0 ? Axes{1, 2} : axis == 1 ? Axes{0, 2} : Axes{0, 1}).to_vector<int64_t>();
    const auto first = std::find(some.begin(), some.end(), 1);
    check(first != some.end(), "nonzero_box", "all voxels of the image ", image.shape(), " are 0");
    box.start.push_back(first - some.begin());
    box.size.push_back(std::find(some.rbegin(), some.rend(), 1).base() - first);
  }
  return box;
}

std::vector<float> sample_foreground(const Case& c, int64_t channel, int64_t count, Generator& random,
                                     int64_t ignore_index) {
  constexpr const char* kOp = "sample_foreground";
  check(count >= 0, kOp, "count must not be negative, got ", count);
  check_image(kOp, c.image);
  check(channel >= 0 && channel < c.image.size(0), kOp, "channel ", channel, " is out of range: case '", c.name,
        "' has ", c.image.size(0), c.image.size(0) == 1 ? " channel" : " channels");
  check(c.label.defined(), kOp, "case '", c.name, "' has no label");
  check(c.label.dtype() == u8 && c.label.shape() == c.image[0].shape(), kOp, "the label of case '", c.name,
        "' must be u8 and fit the image ", c.image.shape(), ", got ", describe(c.label));
  const Tensor label = c.label.to(Device::cpu()).contiguous();
  std::vector<int64_t> places;
  for (int64_t i = 0; i < label.numel(); ++i)
    if (is_foreground(label.data<uint8_t>()[i], ignore_index)) places.push_back(i);
  check(!places.empty(), kOp, "case '", c.name, "' has nothing but background");
  const Tensor values = c.image.select(0, channel).to(Device::cpu()).contiguous();
  std::vector<float> sample(static_cast<size_t>(count));
  for (float& value : sample)
    value = values.data<float>()[places[static_cast<size_t>(random.next_below(std::ssize(places)))]];
  return sample;
}

Intensities measure_intensities(std::vector<float> values) {
  check(!values.empty(), "measure_intensities", "there are no values");
  const bool finite = std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
  check(finite, "measure_intensities", "the values must be finite");
  std::sort(values.begin(), values.end());
  const auto percentile = [&](double percent) {
    const double rank = percent / 100 * static_cast<double>(values.size() - 1), below = std::floor(rank);
    const double low = values[static_cast<size_t>(below)], high = values[static_cast<size_t>(std::ceil(rank))];
    return low + (rank - below) * (high - low);
  };
  double sum = 0, squares = 0;
  for (const double v : values) sum += v;
  const double count = static_cast<double>(values.size()), mean = sum / count;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return {percentile(0.5), percentile(99.5), mean, std::sqrt(squares / count)};
}

}  // namespace nnunet
