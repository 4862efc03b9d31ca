// Draws slices of volumes with overlaid labels.
#include "examples/common/overlays.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "examples/common/canvas.h"

namespace examples {
namespace vg = voxgrad;
namespace {

// Lengths in pixels:
constexpr int64_t kGap = 4;      // between pictures
constexpr int64_t kLeft = 76;    // width of the titles of the rows
constexpr int64_t kTop = 24;     // height of the titles of the columns
constexpr int64_t kLegend = 22;  // height of the legend
constexpr uint32_t kBackground = 0x202020;
constexpr uint32_t kText = 0xe0e0e0;

/// Returns slice `at` along `axis` of a volume (D, H, W). Reverses the rows, so that D and H point up in the picture.
vg::Tensor slice(const vg::Tensor& volume, int64_t axis, int64_t at) {
  return vg::flip(volume.select(axis, at), {0}).contiguous();
}

/// Returns the voxel (d, h, w) that the three slices go through: the mean of the centers of the labels in `o.centered`.
/// Returns the middle of the volume if the volume contains none of these labels.
std::array<int64_t, 3> middle(const Overlays& o) {
  const vg::Tensor labels = o.truth.defined() ? o.truth : o.labels;
  std::map<int64_t, std::array<double, 4>> sums;  // per label: sums of d, h and w, and number of voxels
  const std::vector<int64_t> values = labels.to_vector<int64_t>();
  size_t i = 0;
  for (int64_t d = 0; d < labels.size(0); ++d)
    for (int64_t h = 0; h < labels.size(1); ++h)
      for (int64_t w = 0; w < labels.size(2); ++w) {
        std::array<double, 4>& sum = sums[values[i++]];
        sum[0] += static_cast<double>(d);
        sum[1] += static_cast<double>(h);
        sum[2] += static_cast<double>(w);
        ++sum[3];
      }
  std::array<double, 3> mean{};
  double count = 0;
  for (const int64_t label : o.centered) {
    const std::array<double, 4>& sum = sums[label];
    if (sum[3] == 0) continue;
    for (size_t a = 0; a < 3; ++a) mean[a] += sum[a] / sum[3];
    ++count;
  }
  std::array<int64_t, 3> at{};
  for (size_t a = 0; a < 3; ++a)
    at[a] = count > 0 ? std::lround(mean[a] / count) : labels.size(static_cast<int64_t>(a)) / 2;
  return at;
}

/// Returns the color of a label, 0xRRGGBB. The background is black.
uint32_t color_of(int64_t label) {
  constexpr std::array<uint32_t, 8> kColors{0x6f6f6f, 0xe6194b, 0x3cb44b, 0xffe119,
                                            0x4363d8, 0xf58231, 0x46f0f0, 0x911eb4};
  return label <= 0 ? 0 : kColors[static_cast<size_t>((label - 1) % std::ssize(kColors))];
}

/// Maps the values of a slice to gray levels from 0 to 1: `low` to 0 and `high` to 1.
std::vector<double> gray(const vg::Tensor& plane, double low, double high) {
  std::vector<double> values;
  for (const float value : plane.to_vector<float>())
    values.push_back(std::clamp((static_cast<double>(value) - low) / (high - low), 0.0, 1.0));
  return values;
}

/// Returns the color (1 - amount) * gray + amount * color.
uint32_t blend(double gray, uint32_t color, double amount) {
  uint32_t pixel = 0;
  for (int shift = 0; shift < 24; shift += 8) {
    const double part = (1 - amount) * 255 * gray + amount * static_cast<double>(color >> shift & 255);
    pixel |= static_cast<uint32_t>(std::lround(part)) << shift;
  }
  return pixel;
}

enum class Column : uint8_t { image, truth, labels, error };
constexpr std::array kTitles{"image", "truth", "prediction", "error"};

/// Returns the pixels of a slice for one column of the figure. Voxels whose true label is `ignore_index` show no label
/// in Column::truth and no error in Column::error.
std::vector<uint32_t> paint(Column column, const std::vector<double>& gray, const std::vector<int64_t>& truth,
                            const std::vector<int64_t>& labels, int64_t ignore_index) {
  std::vector<uint32_t> pixels(gray.size());
  for (size_t i = 0; i < gray.size(); ++i) {
    const bool ignored = !truth.empty() && truth[i] == ignore_index;
    const int64_t shown = column != Column::truth ? labels[i] : ignored ? 0 : truth[i];
    if (column == Column::error)
      pixels[i] = blend(gray[i] / 2, 0xff3030, !ignored && truth[i] != labels[i] ? 0.9 : 0);
    else
      pixels[i] = blend(gray[i], color_of(shown), column != Column::image && shown > 0 ? 0.6 : 0);
  }
  return pixels;
}

void draw_legend(Canvas& canvas, double top, const Overlays& overlays) {
  double left = kLeft;
  for (const auto& [label, name] : overlays.names) {
    canvas.polygon(
        std::array<Canvas::Point, 4>{{{left, top - 5}, {left + 10, top - 5}, {left + 10, top + 5}, {left, top + 5}}},
        color_of(label));
    canvas.text({left + 15, top}, 0, name, kText);
    left += 35 + 7.2 * static_cast<double>(name.size());
  }
}

}  // namespace

void write_overlays(const std::filesystem::path& path, const Overlays& o) {
  constexpr std::array kRows{"axial", "coronal", "sagittal"};
  std::vector<Column> columns{Column::image, Column::labels};
  if (o.truth.defined()) columns = {Column::image, Column::truth, Column::labels, Column::error};
  const std::array<int64_t, 3> at = middle(o);
  const double mean = o.image.mean().item(), spread = vg::std(o.image).item();
  const double low = std::max(vg::amin(o.image).item(), mean - 2 * spread);
  const double high = std::min(vg::amax(o.image).item(), mean + 3 * spread);
  const int64_t pitch = std::max({o.image.size(1), o.image.size(2), int64_t{140}}) + kGap;
  int64_t height = kTop + kLegend;
  for (const int64_t axis : {0, 1, 2}) height += o.image.size(axis == 0 ? 1 : 0) + kGap;

  Canvas canvas(kLeft + std::ssize(columns) * pitch, height, kBackground);
  int64_t top = kTop;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const auto plane = [&](const vg::Tensor& volume) { return slice(volume, axis, at[static_cast<size_t>(axis)]); };
    const vg::Tensor shown = plane(o.image);
    const int64_t rows = shown.size(0), width = shown.size(1);
    const std::vector<double> grays = gray(shown, low, high);
    const std::vector<int64_t> labels = plane(o.labels).to_vector<int64_t>();
    const std::vector<int64_t> truth = o.truth.defined() ? plane(o.truth).to_vector<int64_t>() : std::vector<int64_t>();
    canvas.text({kLeft - 8, static_cast<double>(top + rows / 2)}, 1, kRows[static_cast<size_t>(axis)], kText);
    int64_t left = kLeft;
    for (const Column column : columns) {
      const Canvas::Point title{static_cast<double>(left + (pitch - kGap) / 2), kTop / 2};
      if (axis == 0) canvas.text(title, 0.5, kTitles[static_cast<size_t>(column)], kText);
      canvas.pixels(left + (pitch - kGap - width) / 2, top, width, rows,
                    paint(column, grays, truth, labels, o.ignore_index));
      left += pitch;
    }
    top += rows + kGap;
  }
  draw_legend(canvas, static_cast<double>(top) + kLegend / 2.0, o);
  canvas.save(path);
}

}  // namespace examples
