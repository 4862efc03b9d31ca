// Implements the dataset of random patches.
#include "nn/data/patches.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/detail/volume.h"
#include "ops/shape.h"

namespace voxgrad::data {
namespace {

constexpr const char* kOp = "PatchDataset";

/// Reads a part of a source's label.
Tensor read_label(const PatchSource& source, const Dims& start, const Shape& size) {
  Tensor label = source.label(start, size);
  check(label.defined() && label.dtype() == u8 && label.shape() == size, kOp, "the label reader must return ", size,
        " u8 at ", start, ", got ", describe(label));
  return label;
}

/// Reads a part of a source's image.
Tensor read_image(const PatchSource& source, const Dims& start, const Shape& size) {
  Tensor image = source.image(start, size);
  const bool fits = image.defined() && image.dtype() == f32 && image.dim() == 4 && image.size(0) > 0 &&
                    image.shape() == Shape{image.size(0), size[0], size[1], size[2]};
  check(fits, kOp, "the image reader must return (C, D, H, W) f32 with D, H, W of ", size, " at ", start, ", got ",
        describe(image));
  return image;
}

}  // namespace

PatchSource patch_source(const Tensor& image, const Tensor& label) {
  const bool fits = image.defined() && label.defined() && image.dim() == 4 && image.dtype() == f32 &&
                    label.dtype() == u8 && label.shape() == image[0].shape();
  check(fits, kOp, "expected an image (C, D, H, W) f32 and a label (D, H, W) u8, got ", describe(image), " and ",
        describe(label));
  const auto read = [](const Tensor& whole) {
    return [whole](const Dims& start, const Shape& size) { return part_of(whole, start, size); };
  };
  return {label.shape(), read(image), read(label)};
}

PatchSource patch_source(const NpyFile& image, const NpyFile& label) {
  Shape shape = image.shape();
  check(shape.size() == 4 && image.dtype() == f32 && label.dtype() == u8, kOp,
        "expected an image (C, D, H, W) f32 and a label (D, H, W) u8, got ", shape, ' ', image.dtype(), " and ",
        label.shape(), ' ', label.dtype());
  const int64_t channels = shape[0];
  shape.erase(0);
  check(shape == label.shape(), kOp, "the image has shape ", image.shape(), ", but its label has shape ",
        label.shape());
  return {shape,
          [image, channels](const Dims& start, const Shape& size) {
            return image.read({0, start[0], start[1], start[2]}, {channels, size[0], size[1], size[2]});
          },
          [label](const Dims& start, const Shape& size) { return label.read(start, size); }};
}

PatchDataset::Centers PatchDataset::find_centers(const PatchSource& source, int64_t ignore_index) {
  constexpr int64_t kMaxVoxels = 10'000;  // voxels kept per class
  constexpr int64_t kSlab = 1 << 22;      // maximum number of voxels per read, unless a single plane has more
  constexpr size_t kAny = 256;            // index of the entry for all classes together
  std::array<Voxels, 257> voxels;         // kept voxels, by class or kAny
  std::array<int64_t, 257> seen{};        // number of voxels found, by class or kAny
  Generator random(0);
  // Keeps each voxel with the same probability (reservoir sampling, algorithm R of Vitter, 1985).
  const auto add = [&](size_t k, int64_t voxel) {
    const int64_t slot = seen[k] < kMaxVoxels ? seen[k] : random.next_below(seen[k] + 1);
    ++seen[k];
    if (slot == std::ssize(voxels[k])) voxels[k].push_back(0);
    if (slot < kMaxVoxels) voxels[k][static_cast<size_t>(slot)] = voxel;
  };
  const Shape& shape = source.shape;
  const int64_t plane = shape[1] * shape[2], planes = std::max<int64_t>(kSlab / plane, 1);
  for (int64_t z = 0; z < shape[0]; z += planes) {
    const Tensor slab =
        read_label(source, {z, 0, 0}, {std::min(planes, shape[0] - z), shape[1], shape[2]}).contiguous();
    const auto* label = slab.data<uint8_t>();
    for (int64_t i = 0; i < slab.numel(); ++i) {
      if (label[i] == ignore_index) continue;
      if (label[i] != 0) add(label[i], z * plane + i);
      if (ignore_index >= 0) add(kAny, z * plane + i);
    }
  }
  Centers centers;
  if (seen[kAny] < numel(shape)) centers.labeled = std::move(voxels[kAny]);
  for (size_t k = 0; k < kAny; ++k)
    if (!voxels[k].empty()) centers.classes.push_back(std::move(voxels[k]));
  return centers;
}

PatchDataset::PatchDataset(std::vector<PatchSource> sources, const PatchOptions& options)
    : sources_(std::move(sources)), options_(options) {
  const Shape& size = options.size;
  check(!sources_.empty(), kOp, "there are no sources");
  check(size.size() == 3 && *std::min_element(size.begin(), size.end()) > 0, kOp,
        "the size of a patch must be three positive numbers (D, H, W), got ", size);
  check(options.samples >= 0 && options.batch_size > 0 && options.foreground >= 0 && options.foreground <= 1, kOp,
        "samples must be at least 0, batch_size positive and foreground in [0, 1], got ", options.samples, ", ",
        options.batch_size, " and ", options.foreground);
  for (const PatchSource& source : sources_) {
    check(source.shape.size() == 3 && numel(source.shape) > 0 && source.image && source.label, kOp,
          "a source needs a nonempty shape (D, H, W), an image and a label, got shape ", source.shape);
    centers_.push_back(find_centers(source, options.ignore_index));
  }
}

Sample PatchDataset::get(int64_t index, Generator& random) const {
  const auto number = static_cast<size_t>(random.next_below(std::ssize(sources_)));
  const PatchSource& source = sources_[number];
  const auto& [classes, labeled] = centers_[number];
  const double first_foreground = std::nearbyint(static_cast<double>(options_.batch_size) * (1 - options_.foreground));
  const bool foreground = static_cast<double>(index % options_.batch_size) >= first_foreground && !classes.empty();
  const Voxels& centers = foreground ? classes[static_cast<size_t>(random.next_below(std::ssize(classes)))] : labeled;
  Dims voxel;  // the center of the patch; empty for a random position
  if (!centers.empty()) {
    const int64_t i = centers[static_cast<size_t>(random.next_below(std::ssize(centers)))];
    const int64_t height = source.shape[1], width = source.shape[2];
    voxel = {i / (height * width), i / width % height, i % width};
  }
  Dims start;
  Shape size;
  std::vector<int64_t> amounts;  // padding, in the order of pad()
  for (int64_t axis = 2; axis >= 0; --axis) {
    const int64_t length = options_.size[axis];
    const int64_t last = source.shape[axis] - length;  // last possible start; negative if the source is smaller
    int64_t first = last < 0 ? -(-last / 2) : 0;
    if (last > 0)
      first = voxel.empty() ? random.next_below(last + 1) : std::clamp<int64_t>(voxel[axis] - length / 2, 0, last);
    start.insert(0, std::max<int64_t>(first, 0));
    size.insert(0, std::min(length, source.shape[axis]));
    amounts.insert(amounts.end(), {start[0] - first, length - size[0] - (start[0] - first)});
  }
  Sample sample{read_image(source, start, size), read_label(source, start, size)};
  if (size == options_.size) return sample;
  return {pad(sample.input, amounts), pad(sample.target, amounts)};
}

}  // namespace voxgrad::data
