#include "examples/superres/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "core/atomic_file.h"
#include "examples/common/png.h"

namespace superres {
namespace vg = voxgrad;
namespace {

constexpr int64_t kGap = 4;       // pixels between pictures
constexpr double kErrorGain = 5;  // how much the error picture is amplified

/// The middle slice across `axis` of (1, 1, D, H, W), upper rows first.
vg::Tensor middle_slice(const vg::Tensor& volume, int64_t axis) {
  const vg::Tensor slice = volume.select(0, 0).select(0, 0).select(axis, volume.size(axis + 2) / 2);
  return vg::flip(slice, {0});
}

void paste(examples::GreyImage& image, const vg::Tensor& slice, int64_t left, int64_t top, double gain) {
  const std::vector<float> values = slice.to_vector<float>();
  for (int64_t y = 0; y < slice.size(0); ++y)
    for (int64_t x = 0; x < slice.size(1); ++x) {
      const double value = gain * std::abs(values[static_cast<size_t>(y * slice.size(1) + x)]);
      image.at(left + x, top + y) = static_cast<uint8_t>(std::lround(255 * std::clamp(value, 0.0, 1.0)));
    }
}

std::string format(const char* pattern, auto... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

}  // namespace

void write_slices(const std::filesystem::path& path, const TestResult& test) {
  const vg::Tensor enlarged = vg::interpolate(test.low, {.scale_factor = 2.0});
  const std::array<vg::Tensor, 5> columns{enlarged, test.interpolated, test.result, test.truth,
                                          test.result - test.truth};
  int64_t width = 0, height = kGap;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const vg::Tensor slice = middle_slice(test.truth, axis);
    width = std::max(width, 5 * (slice.size(1) + kGap) + kGap);
    height += slice.size(0) + kGap;
  }
  const double peak = vg::amax(test.truth).item();
  examples::GreyImage image(width, height, 32);
  int64_t top = kGap;
  for (int64_t axis = 0; axis < 3; ++axis) {
    int64_t left = kGap, rows = 0;
    for (size_t column = 0; column < columns.size(); ++column) {
      const vg::Tensor slice = middle_slice(columns[column], axis);
      paste(image, slice, left, top, (column == 4 ? kErrorGain : 1) / peak);
      left += slice.size(1) + kGap;
      rows = slice.size(0);
    }
    top += rows + kGap;
  }
  examples::save_png(path, image);
}

void write_losses(const std::filesystem::path& path, const std::vector<LossLine>& lines) {
  std::string text = "step,loss,learning_rate\n";
  for (const LossLine& line : lines)
    text += format("%lld,%.9g,%.9g\n", static_cast<long long>(line.step), line.loss, line.lr);
  vg::write_file(path, text, "write_losses");
}

std::vector<LossLine> read_losses(const std::filesystem::path& path) {
  std::vector<LossLine> lines;
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  while (std::getline(file, text)) {
    long long step = 0;
    LossLine line{};
    if (std::sscanf(text.c_str(), "%lld,%lf,%lf", &step, &line.loss, &line.lr) != 3) break;
    line.step = step;
    lines.push_back(line);
  }
  return lines;
}

void write_report(const std::filesystem::path& path, const RunSummary& run) {
  std::string text = "# " + run.title + "\n\n";
  text +=
      "Resolution doubled from the 2 x 2 x 2 box average of each volume. PSNR and SSIM over the voxels above 5 % of "
      "the maximum; no test voxel was trained on.\n\n";
  text += "| test | trilinear PSNR (dB) | ours | gain | trilinear SSIM | ours |\n|---|---|---|---|---|---|\n";
  for (const TestResult& test : run.tests)
    text += format("| %s | %.2f | %.2f | **%+.2f** | %.4f | %.4f |\n", test.name.c_str(), test.trilinear.psnr,
                   test.ours.psnr, test.ours.psnr - test.trilinear.psnr, test.trilinear.ssim, test.ours.ssim);
  text += format(
      "\nTrained on %s for %lld steps of %lld patches of %lld^3 voxels in %.1f s on %s (%lld parameters, last "
      "loss %.3g); tests took %.1f s. Losses: [losses.csv](losses.csv).\n",
      run.training.c_str(), static_cast<long long>(run.steps), static_cast<long long>(run.batch),
      static_cast<long long>(run.patch), run.train_seconds, run.device.c_str(), static_cast<long long>(run.parameters),
      run.last_loss, run.test_seconds);
  for (const TestResult& test : run.tests)
    text += "\n## " + test.name +
            "\n\nInput, trilinear, ours, truth, and the error of ours five times amplified, in the "
            "middle axial, coronal and sagittal slices; the subject's right is on the right, in the sagittal slice "
            "the front.\n\n![slices](" +
            test.label + ".png)\n";
  vg::write_file(path, text, "write_report");
}

}  // namespace superres
