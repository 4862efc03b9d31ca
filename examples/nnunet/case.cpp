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
    // The matrix is rounded to f32. Prefer the spacing of the header if it differs by no more than that.
    const double spacing = image.spacing[static_cast<size_t>(axis)];
    g.spacing[static_cast<size_t>(axis)] = std::abs(length - spacing) < 1e-5 * length ? spacing : length;
  }
  return g;
}

/// Returns an upper bound, in mm along a world axis, for the distance between voxels of equal index in two geometries
/// of the same shape.
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

/// Throws if `good` is false for a voxel. `voxels` begins at voxel `start` of the file.
template <class Good>
void check_voxels(const std::filesystem::path& path, const Tensor& voxels, const Dims& start, Good good,
                  const std::string& expected) {
  const float* data = voxels.data<float>();
  const int64_t count = voxels.numel(), i = std::find_if_not(data, data + count, good) - data;
  if (i == count) return;
  const int64_t h = voxels.size(1), w = voxels.size(2);
  const Dims place{start[0] + i / (h * w), start[1] + i / w % h, start[2] + i % w};
  fail(kLoad, "'", path.string(), "': voxel ", place, " is ", data[i], ", ", expected);
}

/// Returns `voxels`. Throws if a voxel is not finite.
Tensor to_channel(const std::filesystem::path& path, const Tensor& voxels, const Dims& start) {
  check_voxels(
      path, voxels, start, [](float v) { return std::isfinite(v); }, "not a finite number");
  return voxels;
}

/// Converts a label to u8. Throws if a voxel is neither a class number nor ignore_index.
Tensor to_classes(const std::filesystem::path& path, const Tensor& voxels, const Dims& start, int64_t classes,
                  int64_t ignore_index) {
  const auto end = static_cast<float>(classes), ignored = static_cast<float>(ignore_index);
  const bool ignores = ignore_index >= 0;
  check_voxels(
      path, voxels, start,
      [=](float v) { return (v >= 0 && v < end && v == std::floor(v)) || (ignores && v == ignored); },
      concat("expected a label from 0 to ", classes - 1,
             ignores ? concat(" or the ignored label ", ignore_index) : std::string()));
  return voxels.to(u8);
}

void check_classes(const std::string& name, size_t images, int64_t classes, int64_t ignore_index) {
  check(images > 0 && classes >= 2 && classes <= 256, kLoad, "'", name, "' has ", images, " images and ", classes,
        " classes; expected at least one image and 2 to 256 classes");
  check(ignore_index < 256, kLoad, "'", name, "': labels are u8, so ignore_index must be less than 256, got ",
        ignore_index);
}

/// Returns true if a label value counts as foreground.
bool is_foreground(uint8_t number, int64_t ignore_index) { return number != 0 && number != ignore_index; }

void check_image(const char* op, const Tensor& image) {
  check(image.defined() && image.dim() == 4 && image.dtype() == f32 && image.numel() > 0, op,
        "expected an image (C, D, H, W) f32, got ", describe(image));
}

/// Resizes an image (C, D, H, W) f32 to the spatial shape `size`.
Tensor resized(const Tensor& x, const Shape& size, InterpolateMode mode) {
  if (mode != InterpolateMode::bicubic) return interpolate(x.unsqueeze(0), {.size = size, .mode = mode}).squeeze(0);
  // Bicubic interpolation is 2-D: resize H and W of (C, D, H, W), then D of (C, H, D, W).
  const Tensor planes = interpolate(x, {.size = Dims{size[1], size[2]}, .mode = mode}).transpose(1, 2);
  return interpolate(planes, {.size = Dims{size[0], size[2]}, .mode = mode}).transpose(1, 2).contiguous();
}

/// Resizes a label map (D, H, W) to the shape `size`. Each voxel takes the value of the nearest voxel of `x`.
Tensor resized_classes(const Tensor& x, const Shape& size) {
  return resized(x.to(f32).unsqueeze(0), size, InterpolateMode::nearest_exact).squeeze(0).to(x.dtype());
}

}  // namespace

Case load_case(const std::string& name, const std::vector<std::filesystem::path>& images,
               const std::filesystem::path& label, int64_t classes, int64_t ignore_index) {
  check_classes(name, images.size(), classes, ignore_index);
  Case c{name, {}, {}, {}, {}, {{0, 0, 0}, {}}};
  Tensors channels;
  for (const auto& path : images) {
    const NiftiImage image = load_nifti(path);
    const Geometry geometry = geometry_of(path, image.data.shape(), image);
    if (channels.empty()) c.geometry = c.original = geometry;
    check_same(path, geometry, images[0], c.geometry);
    channels.push_back(to_channel(path, image.data, c.box.start));
  }
  c.image = stack(channels);
  c.box.size = c.geometry.shape;
  if (label.empty()) return c;
  const NiftiImage image = load_nifti(label);
  check_same(label, geometry_of(label, image.data.shape(), image), images[0], c.geometry);
  c.label = to_classes(label, image.data, c.box.start, classes, ignore_index);
  const auto* voxels = c.label.data<uint8_t>();
  const bool any = std::any_of(voxels, voxels + c.label.numel(),
                               [=](uint8_t number) { return is_foreground(number, ignore_index); });
  check(any, kLoad, "'", label.string(), "': there is nothing but background",
        ignore_index < 0 ? "" : " and ignored voxels");
  return c;
}

PatchSource open_case(const std::vector<std::filesystem::path>& images, const std::filesystem::path& label,
                      int64_t classes, int64_t ignore_index) {
  check_classes(label.string(), images.size(), classes, ignore_index);
  std::vector<NiftiFile> channels;
  const NiftiFile labels(label);
  const Geometry geometry = geometry_of(label, labels.shape(), labels.header());
  for (const auto& path : images) {
    const NiftiFile& file = channels.emplace_back(path);
    check_same(path, geometry_of(path, file.shape(), file.header()), label, geometry);
  }
  return {geometry.shape,
          [images, channels](const Dims& start, const Shape& size) {
            Tensors parts;
            for (size_t i = 0; i < images.size(); ++i)
              parts.push_back(to_channel(images[i], channels[i].read(start, size), start));
            return stack(parts);
          },
          [label, labels, classes, ignore_index](const Dims& start, const Shape& size) {
            return to_classes(label, labels.read(start, size), start, classes, ignore_index);
          }};
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

Case crop(const Case& c, const Box& box) {
  check(c.geometry.shape == c.box.size, "crop", "case '", c.name, "' was already resampled");
  Case part = c;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const int64_t start = box.start[axis], size = box.size[axis], all = c.geometry.shape[axis];
    check(start >= 0 && size > 0 && size <= all && start <= all - size, "crop", "a box of size ", box.size, " at ",
          box.start, " does not lie within case '", c.name, "' ", c.geometry.shape);
    part.image = part.image.narrow(axis + 1, start, size);
    if (c.label.defined()) part.label = part.label.narrow(axis, start, size);
    part.box.start[axis] += start;
    for (size_t row = 0; row < 3; ++row)
      part.geometry.affine[row][3] += static_cast<double>(start) * c.geometry.affine[row][column_of(axis)];
  }
  part.image = part.image.contiguous();
  if (c.label.defined()) part.label = part.label.contiguous();
  part.box.size = part.geometry.shape = box.size;
  return part;
}

Tensor z_score(const Tensor& image, const Tensor& mask) {
  check_image("z_score", image);
  const Axes voxels{1, 2, 3};
  double count = static_cast<double>(image.numel() / image.size(0));
  Tensor weight = ones({}, image.options());
  if (mask.defined()) {
    check(mask.dtype() == b8 && mask.shape() == image[0].shape(), "z_score", "expected a bool mask of the image ",
          describe(image), ", got ", describe(mask));
    count = sum(mask).item();
    check(count > 0, "z_score", "the mask is empty");
    weight = mask.to(f32);
  }
  const Tensor mean = sum(image * weight, voxels, true) * (1 / count);
  const Tensor centered = (image - mean) * weight;
  return centered / clamp_min(sqrt(sum(centered * centered, voxels, true) * (1 / count)), 1e-8);
}

std::vector<float> sample_foreground(const Case& c, int64_t channel, int64_t count, Generator& random,
                                     int64_t ignore_index) {
  constexpr const char* kOp = "sample_foreground";
  check(count >= 0, kOp, "count must not be negative, got ", count);
  check_image(kOp, c.image);
  check(channel >= 0 && channel < c.image.size(0), kOp, "channel ", channel, " is out of range: case '", c.name,
        "' has ", c.image.size(0));
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

Tensor ct_normalize(const Tensor& image, const std::vector<Intensities>& channels) {
  check_image("ct_normalize", image);
  check(std::ssize(channels) == image.size(0), "ct_normalize", "the image ", image.shape(), " has ", image.size(0),
        " channels, but there are intensities for ", channels.size());
  Tensors parts;
  for (const Intensities& channel : channels) {
    const double scale = 1 / std::max(channel.std, 1e-8);
    const Tensor clamped = clamp(image[std::ssize(parts)], channel.low, channel.high);
    parts.push_back(affine(clamped, scale, -channel.mean * scale));
  }
  return stack(parts);
}

Case resample(const Case& c, const std::array<double, 3>& spacing, bool cubic) {
  Case result = c;
  for (size_t i = 0; i < 3; ++i) {
    const auto axis = static_cast<int64_t>(i);
    check(std::isfinite(spacing[i]) && spacing[i] > 0, "resample", "spacing must be positive, got ", spacing[i]);
    const double voxels = static_cast<double>(c.geometry.shape[axis]);
    const double wanted = std::round(voxels * c.geometry.spacing[i] / spacing[i]);
    check(wanted <= 32767, "resample", "case '", c.name, "' would have ", wanted, " voxels along an axis");
    result.geometry.shape[axis] = std::max<int64_t>(static_cast<int64_t>(wanted), 1);
    const double ratio = voxels / static_cast<double>(result.geometry.shape[axis]);
    result.geometry.spacing[i] *= ratio;
    for (auto& row : result.geometry.affine) {  // keep the position of the outer faces
      row[3] += row[column_of(axis)] * (ratio - 1) / 2;
      row[column_of(axis)] *= ratio;
    }
  }
  if (result.geometry.shape == c.geometry.shape) return result;
  result.image = resized(c.image, result.geometry.shape, cubic ? InterpolateMode::bicubic : InterpolateMode::trilinear);
  if (c.label.defined()) result.label = resized_classes(c.label, result.geometry.shape);
  return result;
}

NiftiImage restore(const Tensor& prediction, const Case& c) {
  const bool classes = prediction.defined() && prediction.dim() == 3;
  const int64_t lead = classes ? 0 : 1;
  bool fits = classes || (prediction.defined() && prediction.dim() == 4 && prediction.size(0) > 1);
  for (int64_t i = 0; fits && i < 3; ++i) fits = prediction.size(i + lead) == c.geometry.shape[i];
  check(fits, "restore", "expected a prediction (D, H, W) or (K, D, H, W) of ", c.geometry.shape, " for case '", c.name,
        "', got ", describe(prediction));
  Tensor x = prediction.detach();
  if (c.geometry.shape != c.box.size)
    x = classes ? resized_classes(x, c.box.size) : resized(x.to(f32), c.box.size, InterpolateMode::trilinear);
  std::vector<int64_t> amounts;  // voxels before and after the box, along W, H and D
  for (int64_t axis = 2; axis >= 0; --axis) {
    amounts.push_back(c.box.start[axis]);
    amounts.push_back(c.original.shape[axis] - c.box.start[axis] - c.box.size[axis]);
  }
  if (classes)
    x = pad(x, amounts);
  else
    x = cat({pad(x.to(f32).narrow(0, 0, 1), amounts, 1), pad(x.to(f32).narrow(0, 1, x.size(0) - 1), amounts)});
  return {.data = x, .spacing = c.original.spacing, .affine = c.original.affine, .descrip = {}};
}

}  // namespace nnunet
