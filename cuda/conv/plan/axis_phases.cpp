// Divides the axes of a convolution into phases.
#include "cuda/conv/plan/axis_phases.h"
#include "core/detail/divide.h"

#include <algorithm>
#include <numeric>

namespace voxgrad::cuda {
namespace {

constexpr int64_t kLimit = 1 << 28;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

bool in_range(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const double reach = static_cast<double>(std::max(in_size, out_size)) * static_cast<double>(stride) +
                       static_cast<double>(kernel) * static_cast<double>(dilation) + static_cast<double>(padding);
  return reach < static_cast<double>(kLimit);
}

/// Adds a phase to an axis, and computes the range of row positions that its first result reads.
void add(AxisPhases& axis, AxisPhase phase) {
  const int64_t last = phase.start + static_cast<int64_t>(phase.taps - 1) * phase.step;
  const int64_t low = floor_div(std::min<int64_t>(phase.start, last), axis.fold);
  phase.low = static_cast<int>(low);
  phase.span = static_cast<int>(floor_div(std::max<int64_t>(phase.start, last), axis.fold) - low + 1);
  axis.count = std::max(axis.count, phase.count);
  axis.max_span = std::max(axis.max_span, phase.span);
  axis.phase[axis.phases++] = phase;
}

}  // namespace

std::optional<AxisPhases> fprop_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation, bool fold) {
  if (!in_range(in_size, out_size, kernel, stride, padding, dilation)) return std::nullopt;
  AxisPhases axis{};
  axis.in_size = in_size;
  axis.out_step = 1;
  axis.fold = fold ? static_cast<int>(stride) : 1;
  axis.in_step = fold ? 1 : static_cast<int>(stride);
  axis.kernel = static_cast<int>(kernel);
  axis.complete = true;
  const int64_t residues = axis.in_step;
  const int64_t tap_step = residues / std::gcd(residues, dilation);
  for (int64_t k = 0; k < std::min(tap_step, kernel); ++k) {
    if (axis.phases == kMaxAxisPhases) return std::nullopt;
    const int64_t offset = k * dilation - padding, residue = modulo(offset, residues);
    AxisPhase phase{};
    phase.count = static_cast<int>(out_size);
    phase.residue = static_cast<int>(residue);
    phase.start = static_cast<int>((offset - residue) / residues);
    phase.step = static_cast<int>(tap_step * dilation / residues);
    phase.tap_first = static_cast<int>(k);
    phase.tap_step = static_cast<int>(tap_step);
    phase.taps = static_cast<int>((kernel - 1 - k) / tap_step + 1);
    add(axis, phase);
  }
  return axis;
}

std::optional<AxisPhases> dgrad_phases(int64_t in_size, int64_t out_size, int64_t kernel, int64_t stride,
                                       int64_t padding, int64_t dilation) {
  if (!in_range(in_size, out_size, kernel, stride, padding, dilation)) return std::nullopt;
  AxisPhases axis{};
  axis.in_size = in_size;
  axis.out_step = static_cast<int>(stride);
  axis.fold = axis.in_step = 1;
  axis.kernel = static_cast<int>(kernel);
  const int64_t tap_step = stride / std::gcd(stride, dilation);
  int64_t reached = 0;
  for (int64_t k = 0; k < std::min(tap_step, kernel); ++k) {  // first tap of each phase
    const int64_t first = modulo(k * dilation - padding, stride);
    if (first >= out_size) continue;
    if (axis.phases == kMaxAxisPhases) return std::nullopt;
    AxisPhase phase{};
    phase.first = static_cast<int>(first);
    phase.count = static_cast<int>(divide_up(out_size - first, stride));
    phase.start = static_cast<int>((first + padding - k * dilation) / stride);
    phase.step = static_cast<int>(-tap_step * dilation / stride);
    phase.tap_first = static_cast<int>(k);
    phase.tap_step = static_cast<int>(tap_step);
    phase.taps = static_cast<int>((kernel - 1 - k) / tap_step + 1);
    reached += phase.count;
    add(axis, phase);
  }
  axis.complete = reached == out_size;
  return axis;
}

void merge_halos(AxisPhases& axis) {
  int low = axis.phase[0].low, high = low + axis.phase[0].span;
  for (int i = 1; i < axis.phases; ++i) {
    low = std::min(low, axis.phase[i].low);
    high = std::max(high, axis.phase[i].low + axis.phase[i].span);
  }
  for (int i = 0; i < axis.phases; ++i) {
    axis.phase[i].low = low;
    axis.phase[i].span = high - low;
  }
  axis.max_span = high - low;
}

}  // namespace voxgrad::cuda
