// Draws the pictures of a run.
#include "examples/superres/pictures.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "examples/common/canvas.h"
#include "examples/common/plot.h"

namespace superres {
namespace vg = voxgrad;
namespace {

using examples::Canvas;

constexpr int64_t kGap = 4;       // pixels between pictures
constexpr double kErrorGain = 5;  // factor that amplifies the error picture

/// Returns the middle slice along spatial axis `axis` of a volume (1, 1, D, H, W). Reverses the rows, so that D and H
/// point up in the picture.
vg::Tensor middle_slice(const vg::Tensor& volume, int64_t axis) {
  const vg::Tensor slice = volume.select(0, 0).select(0, 0).select(axis, volume.size(axis + 2) / 2);
  return vg::flip(slice, {0});
}

/// Converts a slice to gray values: 255 * min(gain * |value|, 1).
std::vector<uint8_t> gray(const vg::Tensor& slice, double gain) {
  std::vector<uint8_t> pixels;
  for (float value : slice.to_vector<float>())
    pixels.push_back(static_cast<uint8_t>(std::lround(255 * std::min(gain * std::abs(value), 1.0))));
  return pixels;
}

}  // namespace

void write_slices(const std::filesystem::path& path, const TestResult& test) {
  constexpr int64_t kLeft = 76;        // width of the titles of the rows
  constexpr int64_t kTop = 24;         // height of the titles of the columns
  constexpr int64_t kMinColumn = 110;  // width of the longest title of a column
  constexpr uint32_t kBackground = 0x202020, kText = 0xe0e0e0;
  const vg::Tensor enlarged = vg::interpolate(test.low, {.scale_factor = 2.0});
  const std::array<vg::Tensor, 5> volumes{enlarged, test.trilinear, test.network, test.truth,
                                          test.network - test.truth};
  const std::array titles{"low resolution", "trilinear", "network", "truth", "error x 5"};
  const std::array rows{"axial", "coronal", "sagittal"};
  const int64_t column = std::max({test.truth.size(3), test.truth.size(4), kMinColumn}) + kGap;
  int64_t height = kTop;
  for (int64_t axis = 0; axis < 3; ++axis) height += middle_slice(test.truth, axis).size(0) + kGap;
  const double peak = vg::amax(test.truth).item();

  Canvas canvas(kLeft + 5 * column, height, kBackground);
  for (size_t i = 0; i < titles.size(); ++i) {
    const int64_t left = kLeft + static_cast<int64_t>(i) * column;
    canvas.text({static_cast<double>(left + (column - kGap) / 2), kTop / 2}, 0.5, titles[i], kText);
    int64_t top = kTop;
    for (int64_t axis = 0; axis < 3; ++axis) {
      const vg::Tensor slice = middle_slice(volumes[i], axis);
      const int64_t slice_rows = slice.size(0), width = slice.size(1);
      canvas.pixels(left + (column - kGap - width) / 2, top, width, slice_rows,
                    gray(slice, (i == 4 ? kErrorGain : 1) / peak));
      if (i == 0)
        canvas.text({kLeft - 8, static_cast<double>(top + slice_rows / 2)}, 1, rows[static_cast<size_t>(axis)], kText);
      top += slice_rows + kGap;
    }
  }
  canvas.save(path);
}

void write_loss_curve(const std::filesystem::path& path, const std::vector<LossLine>& losses) {
  examples::Curve curve{"training loss (mean squared error)", {}, true};
  for (const LossLine& line : losses) curve.points.push_back({static_cast<double>(line.step), line.loss});
  examples::write_curves(path, {&curve, 1});
}

}  // namespace superres
