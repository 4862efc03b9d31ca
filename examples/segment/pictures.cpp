#include "examples/segment/pictures.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "examples/common/canvas.h"

namespace segment {
namespace vg = voxgrad;
namespace {

using examples::Canvas;

constexpr int64_t kGap = 4, kLeft = 76, kTop = 24, kLegend = 22;  // pixels
constexpr uint32_t kBackground = 0x202020, kText = 0xe0e0e0;

/// Returns slice `at` along `axis` of a volume (D, H, W). Reverses the rows, so that D and H point up in the picture.
vg::Tensor slice(const vg::Tensor& volume, int64_t axis, int64_t at) {
  return vg::flip(volume.select(axis, at), {0}).contiguous();
}

std::vector<uint8_t> bytes(const vg::Tensor& plane) {
  return {plane.data<uint8_t>(), plane.data<uint8_t>() + plane.numel()};
}

/// Returns the mean of the centers of the scored classes as voxel indices (d, h, w). Returns the middle of the volume
/// if it contains no scored class.
std::array<int64_t, 3> middle(const vg::Tensor& label, const Task& task) {
  std::vector<std::array<double, 4>> sums(256);  // per class: sums of d, h and w, and number of voxels
  const uint8_t* values = label.data<uint8_t>();
  for (int64_t d = 0; d < label.size(0); ++d)
    for (int64_t h = 0; h < label.size(1); ++h)
      for (int64_t w = 0; w < label.size(2); ++w, ++values) {
        std::array<double, 4>& sum = sums[*values];
        sum[0] += static_cast<double>(d);
        sum[1] += static_cast<double>(h);
        sum[2] += static_cast<double>(w);
        ++sum[3];
      }
  std::array<double, 3> mean{};
  double count = 0;
  for (const int64_t c : task.scored) {
    const std::array<double, 4>& sum = sums[static_cast<size_t>(c)];
    if (sum[3] == 0) continue;
    for (size_t a = 0; a < 3; ++a) mean[a] += sum[a] / sum[3];
    ++count;
  }
  std::array<int64_t, 3> at{};
  for (size_t a = 0; a < 3; ++a)
    at[a] = count > 0 ? std::lround(mean[a] / count) : label.size(static_cast<int64_t>(a)) / 2;
  return at;
}

/// Maps the values of a slice to gray levels from 0 to 1: `low` to 0 and `high` to 1.
std::vector<double> gray(const vg::Tensor& plane, double low, double high) {
  std::vector<double> values;
  for (const float value : plane.to_vector<float>())
    values.push_back(std::clamp((static_cast<double>(value) - low) / (high - low), 0.0, 1.0));
  return values;
}

uint32_t blend(double gray, uint32_t color, double amount) {
  uint32_t pixel = 0;
  for (int shift = 0; shift < 24; shift += 8) {
    const double part = (1 - amount) * 255 * gray + amount * static_cast<double>(color >> shift & 255);
    pixel |= static_cast<uint32_t>(std::lround(part)) << shift;
  }
  return pixel;
}

enum class Column : uint8_t { image, truth, labels, error };
constexpr std::array kColumns{Column::image, Column::truth, Column::labels, Column::error};
constexpr std::array kTitles{"image", "truth", "prediction", "error"};

/// Returns the pixels of a slice in a column. Voxels whose true label is ignore_index show no class in the column
/// `truth` and no error in the column `error`.
std::vector<uint32_t> paint(Column column, const std::vector<double>& gray, const std::vector<uint8_t>& truth,
                            const std::vector<uint8_t>& labels, int64_t ignore_index) {
  std::vector<uint32_t> pixels(gray.size());
  for (size_t i = 0; i < gray.size(); ++i) {
    const bool ignored = truth[i] == ignore_index;
    const uint8_t shown = column != Column::truth ? labels[i] : ignored ? uint8_t{0} : truth[i];
    if (column == Column::error)
      pixels[i] = blend(gray[i] / 2, 0xff3030, !ignored && truth[i] != labels[i] ? 0.9 : 0);
    else
      pixels[i] = blend(gray[i], color_of(shown), column != Column::image && shown > 0 ? 0.6 : 0);
  }
  return pixels;
}

void draw_legend(Canvas& canvas, double top, const Task& task) {
  double left = kLeft;
  for (int64_t c = 1; c < std::ssize(task.classes); ++c) {
    const std::string& name = task.classes[static_cast<size_t>(c)];
    canvas.polygon(
        std::array<Canvas::Point, 4>{{{left, top - 5}, {left + 10, top - 5}, {left + 10, top + 5}, {left, top + 5}}},
        color_of(c));
    canvas.text({left + 15, top}, 0, name, kText);
    left += 35 + 7.2 * static_cast<double>(name.size());
  }
}

}  // namespace

uint32_t color_of(int64_t c) {
  constexpr std::array<uint32_t, 8> kColors{0x6f6f6f, 0xe6194b, 0x3cb44b, 0xffe119,
                                            0x4363d8, 0xf58231, 0x46f0f0, 0x911eb4};
  return c <= 0 ? 0 : kColors[static_cast<size_t>((c - 1) % std::ssize(kColors))];
}

void write_overlays(const std::filesystem::path& path, const Case& c, const vg::Tensor& labels, const Task& task) {
  constexpr std::array kRows{"axial", "coronal", "sagittal"};
  const vg::Tensor image = c.image.select(0, 0);
  const std::array<int64_t, 3> at = middle(c.label, task);
  const double mean = image.mean().item(), spread = vg::std(image).item();
  const double low = std::max(vg::amin(image).item(), mean - 2 * spread);
  const double high = std::min(vg::amax(image).item(), mean + 3 * spread);
  const int64_t column = std::max({image.size(1), image.size(2), int64_t{140}}) + kGap;
  int64_t height = kTop + kLegend;
  for (const int64_t axis : {0, 1, 2}) height += image.size(axis == 0 ? 1 : 0) + kGap;

  Canvas canvas(kLeft + std::ssize(kColumns) * column, height, kBackground);
  int64_t top = kTop;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const auto plane = [&](const vg::Tensor& volume) { return slice(volume, axis, at[static_cast<size_t>(axis)]); };
    const vg::Tensor shown = plane(image);
    const int64_t rows = shown.size(0), width = shown.size(1);
    canvas.text({kLeft - 8, static_cast<double>(top + rows / 2)}, 1, kRows[static_cast<size_t>(axis)], kText);
    for (size_t i = 0; i < kColumns.size(); ++i) {
      const int64_t left = kLeft + static_cast<int64_t>(i) * column;
      if (axis == 0) canvas.text({static_cast<double>(left + (column - kGap) / 2), kTop / 2}, 0.5, kTitles[i], kText);
      canvas.pixels(
          left + (column - kGap - width) / 2, top, width, rows,
          paint(kColumns[i], gray(shown, low, high), bytes(plane(c.label)), bytes(plane(labels)), task.ignore_index));
    }
    top += rows + kGap;
  }
  draw_legend(canvas, static_cast<double>(top) + kLegend / 2.0, task);
  canvas.save(path);
}

}  // namespace segment
