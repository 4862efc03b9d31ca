#include "nn/data/patches.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/volume.h"

namespace voxgrad::data {
namespace {

constexpr const char* kOp = "PatchDataset";

/// Up to kMost voxels of each class but background, each with the same chance (Vitter's reservoir, algorithm R, 1985).
std::vector<std::vector<int64_t>> find_classes(const PatchSource& source, int64_t ignore_index) {
  constexpr int64_t kMost = 10'000, kSlab = 1 << 22;  // voxels that are read at once
  std::array<std::vector<int64_t>, 256> voxels;
  std::array<int64_t, 256> seen{};
  Generator random(0);
  const Shape& shape = source.shape;
  const int64_t plane = shape[1] * shape[2], planes = std::max<int64_t>(kSlab / plane, 1);
  for (int64_t z = 0; z < shape[0]; z += planes) {
    const Tensor slab = source.label({z, 0, 0}, {std::min(planes, shape[0] - z), shape[1], shape[2]}).contiguous();
    const auto* label = slab.data<uint8_t>();
    for (int64_t i = 0; i < slab.numel(); ++i) {
      const size_t k = label[i];
      if (k == 0 || static_cast<int64_t>(k) == ignore_index) continue;
      const int64_t slot = seen[k] < kMost ? seen[k] : random.next_below(seen[k] + 1);
      ++seen[k];
      if (slot == std::ssize(voxels[k])) voxels[k].push_back(0);
      if (slot < kMost) voxels[k][static_cast<size_t>(slot)] = z * plane + i;
    }
  }
  std::vector<std::vector<int64_t>> present;
  for (auto& of_class : voxels)
    if (!of_class.empty()) present.push_back(std::move(of_class));
  return present;
}

}  // namespace

PatchSource patch_source(const Case& c) {
  check(c.label.defined() && c.image.dim() == 4 && c.label.shape() == c.geometry.shape, kOp, "case '", c.name,
        "' needs an image and a label of one shape, has ", describe(c.image), " and ", describe(c.label));
  const auto read = [](const Tensor& whole) {
    return [whole](const Dims& start, const Shape& size) { return part_of(whole, start, size); };
  };
  return {c.geometry.shape, read(c.image), read(c.label)};
}

PatchSource patch_source(const NpyFile& image, const NpyFile& label) {
  Shape shape = image.shape();
  check(shape.size() == 4 && image.dtype() == f32 && label.dtype() == u8, kOp,
        "expected (C, D, H, W) f32 and a label of u8, got ", shape, ' ', image.dtype(), " and ", label.shape(), ' ',
        label.dtype());
  const int64_t channels = shape[0];
  shape.erase(0);
  check(shape == label.shape(), kOp, "an image has shape ", image.shape(), ", its label ", label.shape());
  return {shape,
          [image, channels](const Dims& start, const Shape& size) {
            return image.read({0, start[0], start[1], start[2]}, {channels, size[0], size[1], size[2]});
          },
          [label](const Dims& start, const Shape& size) { return label.read(start, size); }};
}

PatchDataset::PatchDataset(std::vector<PatchSource> sources, const PatchOptions& options)
    : sources_(std::move(sources)), options_(options) {
  const Shape& size = options.size;
  check(!sources_.empty(), kOp, "there are no cases");
  check(size.size() == 3 && *std::min_element(size.begin(), size.end()) > 0, kOp,
        "the size of a patch must be (D, H, W), got ", size);
  check(options.samples >= 0 && options.batch_size > 0 && options.foreground >= 0 && options.foreground <= 1, kOp,
        "got ", options.samples, " samples, batch size ", options.batch_size, " and foreground ", options.foreground,
        "; foreground is a part of 1");
  for (const PatchSource& source : sources_) {
    check(source.shape.size() == 3 && numel(source.shape) > 0 && source.image && source.label, kOp,
          "a source needs voxels (D, H, W), an image and a label, its shape is ", source.shape);
    classes_.push_back(find_classes(source, options.ignore_index));
  }
}

Sample PatchDataset::get(int64_t index, Generator& random) const {
  const auto which = static_cast<size_t>(random.next_below(std::ssize(sources_)));
  const PatchSource& source = sources_[which];
  const auto& classes = classes_[which];
  const double anywhere = std::nearbyint(static_cast<double>(options_.batch_size) * (1 - options_.foreground));
  Dims voxel;  // that has to be inside
  if (static_cast<double>(index % options_.batch_size) >= anywhere && !classes.empty()) {
    const Voxels& voxels = classes[static_cast<size_t>(random.next_below(std::ssize(classes)))];
    const int64_t i = voxels[static_cast<size_t>(random.next_below(std::ssize(voxels)))];
    const int64_t height = source.shape[1], width = source.shape[2];
    voxel = {i / (height * width), i / width % height, i % width};
  }
  Dims start;
  Shape size;
  std::vector<int64_t> amounts;  // of padding, from the last axis on
  for (int64_t axis = 2; axis >= 0; --axis) {
    const int64_t wanted = options_.size[axis], room = source.shape[axis] - wanted;
    int64_t first = room < 0 ? -(-room / 2) : 0;
    if (room > 0)
      first = voxel.empty() ? random.next_below(room + 1) : std::clamp<int64_t>(voxel[axis] - wanted / 2, 0, room);
    start.insert(0, std::max<int64_t>(first, 0));
    size.insert(0, std::min(wanted, source.shape[axis]));
    amounts.insert(amounts.end(), {start[0] - first, wanted - size[0] - (start[0] - first)});
  }
  Sample sample{source.image(start, size), source.label(start, size)};
  if (size == options_.size) return sample;
  return {pad(sample.input, amounts), pad(sample.target, amounts)};
}

}  // namespace voxgrad::data
