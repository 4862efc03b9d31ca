// Draws plots of curves.
#include "examples/common/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace examples {
namespace {

constexpr uint32_t kInk = 0x303030, kGrid = 0xdddddd, kArea = 0xbcd4ec, kLine = 0x1f5fa8;
constexpr double kWidth = 720, kHeight = 400, kLeft = 84, kRight = kWidth - 28, kTop = 40,
                 kBottom = kHeight - 60;  // pixels

/// Returns the i-th number of the series ..., 0.2, 0.5, 1, 2, 5, 10, ..., where tick(0) = 1. `i` may be negative.
double tick(int64_t i) {
  const int64_t decade = (i >= 0 ? i : i - 2) / 3;
  return std::array{1.0, 2.0, 5.0}[static_cast<size_t>(i - 3 * decade)] * std::pow(10.0, static_cast<double>(decade));
}

/// Returns the index of the smallest tick that is at least `value`.
int64_t tick_above(double value) {
  auto i = static_cast<int64_t>(std::floor(3 * std::log10(value))) - 3;
  while (tick(i) < value * (1 - 1e-9)) ++i;
  return i;
}

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

/// A linear map from the values of an axis to pixels.
struct Axis {
  double low;   // value at the start of the axis
  double high;  // value at the end of the axis
  double from;  // pixel at the start of the axis
  double to;    // pixel at the end of the axis
  double operator()(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

/// A summary of the values at consecutive steps.
struct Bin {
  double step;  // mean of the first and the last step
  double mean;
  double lowest;
  double highest;
};

/// Divides the points of a curve into at most 100 bins.
std::vector<Bin> make_bins(const Curve& curve) {
  const int64_t all = std::ssize(curve.points), count = std::min<int64_t>(100, all);
  std::vector<Bin> result;
  for (int64_t i = 0; i < count; ++i) {
    const auto first = curve.points.begin() + i * all / count, last = curve.points.begin() + (i + 1) * all / count;
    Bin bin{((*first)[0] + (*(last - 1))[0]) / 2, 0, 1e30, -1e30};
    for (auto point = first; point != last; ++point) {
      const double value = std::clamp((*point)[1], curve.logarithmic ? 1e-30 : -1e30, 1e30);
      bin.mean += value / static_cast<double>(last - first);
      bin.lowest = std::min(bin.lowest, value);
      bin.highest = std::max(bin.highest, value);
    }
    result.push_back(bin);
  }
  return result;
}

/// The vertical axis and the values of its labels.
struct Scale {
  Axis axis;
  std::vector<double> ticks;

  Scale(const std::vector<Bin>& bins, bool logarithmic) {
    const double low = std::ranges::min(bins, {}, &Bin::lowest).lowest;
    const double high = std::ranges::max(bins, {}, &Bin::highest).highest;
    if (logarithmic) {
      const int64_t highest = tick_above(high), lowest = tick_above(low) - 1;
      axis = {std::log(tick(lowest)), std::log(tick(highest)), kBottom, kTop};
      for (int64_t i = lowest; i <= highest; ++i)
        if (highest - lowest <= 12 || i % 3 == 0)
          ticks.push_back(tick(i));  // if there are many ticks, only powers of ten
      return;
    }
    const double step = tick(tick_above(std::max(high - low, 1e-6) / 6));
    const double first = std::floor(low / step), last = std::max(std::ceil(high / step), first + 1);
    axis = {first * step, last * step, kBottom, kTop};
    for (double i = first; i <= last; ++i) ticks.push_back(i * step);
  }
};

/// Draws a curve with its axes. The plot begins `offset` pixels below the top of the canvas.
void draw(Canvas& canvas, const Curve& curve, double offset) {
  const std::vector<Bin> bins = make_bins(curve);
  const Scale scale(bins, curve.logarithmic);
  const double steps = std::max(curve.points.back()[0], 1.0);
  const Axis x{0, steps, kLeft, kRight};
  const auto y = [&](double value) { return offset + scale.axis(curve.logarithmic ? std::log(value) : value); };
  for (const double value : scale.ticks) {
    const double at = std::round(y(value)) + 0.5;
    canvas.line(std::array<Canvas::Point, 2>{{{kLeft, at}, {kRight, at}}}, kGrid, 1);
    canvas.text({kLeft - 8, at}, 1, number(value), kInk);
  }
  const double every = std::max(tick(tick_above(steps / 8)), 1.0), bottom = offset + kBottom;
  for (double step = 0; step <= steps; step += every) {
    const double at = std::round(x(step)) + 0.5;
    canvas.line(std::array<Canvas::Point, 2>{{{at, bottom}, {at, bottom + 6}}}, kInk, 1);
    canvas.text({at, bottom + 18}, 0.5, number(step), kInk);
  }
  std::vector<Canvas::Point> means, area;
  for (const Bin& bin : bins) {
    means.push_back({x(bin.step), y(bin.mean)});
    area.push_back({x(bin.step), y(bin.highest)});
  }
  for (auto bin = bins.rbegin(); bin != bins.rend(); ++bin) area.push_back({x(bin->step), y(bin->lowest)});
  canvas.polygon(area, kArea);
  canvas.line(means, kLine, 2);
  canvas.line(
      std::array<Canvas::Point, 3>{{{kLeft + .5, offset + kTop}, {kLeft + .5, bottom + .5}, {kRight, bottom + .5}}},
      kInk, 1);
  canvas.text({(kLeft + kRight) / 2, offset + kHeight - 16}, 0.5, "step", kInk);
  const bool binned = bins.size() < curve.points.size();
  canvas.text({kLeft, offset + 18}, 0, curve.title + (binned ? ": mean and range in 100 bins" : ""), kInk);
}

}  // namespace

void write_curves(const std::filesystem::path& path, std::span<const Curve> curves) {
  const auto shown = std::ranges::count_if(curves, [](const Curve& curve) { return !curve.points.empty(); });
  Canvas canvas(static_cast<int64_t>(kWidth), std::max<int64_t>(shown, 1) * static_cast<int64_t>(kHeight), 0xffffff);
  double offset = 0;
  for (const Curve& curve : curves) {
    if (curve.points.empty()) continue;
    draw(canvas, curve, offset);
    offset += kHeight;
  }
  canvas.save(path);
}

}  // namespace examples
