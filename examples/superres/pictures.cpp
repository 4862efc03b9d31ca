#include "examples/superres/pictures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "examples/common/canvas.h"

namespace superres {
namespace vg = voxgrad;
namespace {

using examples::Canvas;

constexpr int64_t kGap = 4;       // pixels between pictures
constexpr double kErrorGain = 5;  // how much the error picture is amplified

/// The middle slice across `axis` of (1, 1, D, H, W), upper rows first.
vg::Tensor middle_slice(const vg::Tensor& volume, int64_t axis) {
  const vg::Tensor slice = volume.select(0, 0).select(0, 0).select(axis, volume.size(axis + 2) / 2);
  return vg::flip(slice, {0});
}

std::vector<uint8_t> grey(const vg::Tensor& slice, double gain) {
  std::vector<uint8_t> pixels;
  for (float value : slice.to_vector<float>())
    pixels.push_back(static_cast<uint8_t>(std::lround(255 * std::min(gain * std::abs(value), 1.0))));
  return pixels;
}

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

/// 1, 2 or 5 times a power of ten: tick(0) = 1, tick(1) = 2, tick(2) = 5, tick(3) = 10, ...
double tick(int64_t i) {
  const int64_t decade = (i >= 0 ? i : i - 2) / 3;
  return std::array{1.0, 2.0, 5.0}[static_cast<size_t>(i - 3 * decade)] * std::pow(10.0, static_cast<double>(decade));
}

/// The first tick that is not below `value`.
int64_t tick_above(double value) {
  auto i = static_cast<int64_t>(std::floor(3 * std::log10(value))) - 3;
  while (tick(i) < value * (1 - 1e-9)) ++i;
  return i;
}

/// Where a number lies along an axis of the picture.
struct Axis {
  double low, high, from, to;  // numbers, pixels
  double operator()(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

/// Losses of a stretch of steps.
struct Stretch {
  double step, mean, lowest, highest;
};

std::vector<Stretch> stretches(const std::vector<LossLine>& losses) {
  const int64_t count = std::min<int64_t>(100, std::ssize(losses));
  std::vector<Stretch> result;
  for (int64_t i = 0; i < count; ++i) {
    const auto first = losses.begin() + i * std::ssize(losses) / count;
    const auto last = losses.begin() + (i + 1) * std::ssize(losses) / count;
    Stretch s{static_cast<double>(first->step + (last - 1)->step) / 2, 0, 1e30, 0};
    for (auto line = first; line != last; ++line) {
      const double loss = std::clamp(line->loss, 1e-30, 1e30);  // for the logarithm
      s.mean += loss / static_cast<double>(last - first);
      s.lowest = std::min(s.lowest, loss);
      s.highest = std::max(s.highest, loss);
    }
    result.push_back(s);
  }
  return result;
}

}  // namespace

void write_slices(const std::filesystem::path& path, const TestResult& test) {
  constexpr int64_t kLeft = 76, kTop = 24, kNarrowest = 110;  // so that titles fit
  constexpr uint32_t kBackground = 0x202020, kText = 0xe0e0e0;
  const vg::Tensor enlarged = vg::interpolate(test.low, {.scale_factor = 2.0});
  const std::array<vg::Tensor, 5> volumes{enlarged, test.interpolated, test.result, test.truth,
                                          test.result - test.truth};
  const std::array titles{"low resolution", "trilinear", "ours", "truth", "error x 5"};
  const std::array rows{"axial", "coronal", "sagittal"};
  const int64_t column = std::max({test.truth.size(3), test.truth.size(4), kNarrowest}) + kGap;
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
      const int64_t rows_of = slice.size(0), width = slice.size(1);
      canvas.pixels(left + (column - kGap - width) / 2, top, width, rows_of,
                    grey(slice, (i == 4 ? kErrorGain : 1) / peak));
      if (i == 0)
        canvas.text({kLeft - 8, static_cast<double>(top + rows_of / 2)}, 1, rows[static_cast<size_t>(axis)], kText);
      top += rows_of + kGap;
    }
  }
  canvas.save(path);
}

void write_loss_curve(const std::filesystem::path& path, const std::vector<LossLine>& losses) {
  constexpr uint32_t kInk = 0x303030, kGrid = 0xdddddd, kArea = 0xbcd4ec, kLine = 0x1f5fa8;
  constexpr double kWidth = 720, kHeight = 400, kLeft = 84, kRight = kWidth - 28, kTop = 40, kBottom = kHeight - 60;
  const std::vector<Stretch> parts = stretches(losses);
  const auto low = std::ranges::min(parts, {}, &Stretch::lowest).lowest;
  const auto high = std::ranges::max(parts, {}, &Stretch::highest).highest;
  const int64_t highest = tick_above(high), lowest = tick_above(low) - 1;
  const auto steps = static_cast<double>(losses.back().step);
  const Axis x{0, steps, kLeft, kRight};
  const Axis log_y{std::log(tick(lowest)), std::log(tick(highest)), kBottom, kTop};
  const auto y = [&](double loss) { return log_y(std::log(loss)); };

  Canvas canvas(static_cast<int64_t>(kWidth), static_cast<int64_t>(kHeight), 0xffffff);
  const bool all_ticks = highest - lowest <= 12;  // or only the powers of ten
  for (int64_t i = lowest; i <= highest; ++i) {
    if (!all_ticks && i % 3 != 0) continue;
    const double at = std::round(y(tick(i))) + 0.5;
    canvas.line(std::array<Canvas::Point, 2>{{{kLeft, at}, {kRight, at}}}, kGrid, 1);
    canvas.text({kLeft - 8, at}, 1, number(tick(i)), kInk);
  }
  const double every = std::max(tick(tick_above(steps / 8)), 1.0);
  for (double step = 0; step <= steps; step += every) {
    const double at = std::round(x(step)) + 0.5;
    canvas.line(std::array<Canvas::Point, 2>{{{at, kBottom}, {at, kBottom + 6}}}, kInk, 1);
    canvas.text({at, kBottom + 18}, 0.5, number(step), kInk);
  }
  std::vector<Canvas::Point> means, area;
  for (const Stretch& s : parts) {
    means.push_back({x(s.step), y(s.mean)});
    area.push_back({x(s.step), y(s.highest)});
  }
  for (auto s = parts.rbegin(); s != parts.rend(); ++s) area.push_back({x(s->step), y(s->lowest)});
  canvas.polygon(area, kArea);
  canvas.line(means, kLine, 2);
  canvas.line(std::array<Canvas::Point, 3>{{{kLeft + .5, kTop}, {kLeft + .5, kBottom + .5}, {kRight, kBottom + .5}}},
              kInk, 1);
  canvas.text({(kLeft + kRight) / 2, kHeight - 16}, 0.5, "step", kInk);
  const std::string binned = parts.size() < losses.size() ? ": mean and range of each hundredth of the steps" : "";
  canvas.text({kLeft, 18}, 0, "loss (mean squared error)" + binned, kInk);
  canvas.save(path);
}

}  // namespace superres
