// The tiles of a CPU convolution, and the windows of the input that the tiles read.
#include "ops/cpu/conv_pack.h"

#include <utility>

namespace voxgrad::cpu {

AxisWindow::AxisWindow(const ConvGather& gather, int64_t kernel, int64_t length)
    : base(static_cast<size_t>(kernel), 0) {
  std::vector<ConvTap> taps;
  for (const ConvPhase& phase : gather.phases) taps.insert(taps.end(), phase.taps.begin(), phase.taps.end());
  // The inputs of one tap are in_step apart, so only taps whose offsets have the same residue share inputs.
  auto residue = [&](const ConvTap& tap) { return (tap.offset % gather.in_step + gather.in_step) % gather.in_step; };
  std::sort(taps.begin(), taps.end(), [&](const ConvTap& s, const ConvTap& t) {
    return std::pair(residue(s), s.offset) < std::pair(residue(t), t.offset);
  });
  for (const ConvTap& tap : taps) {
    const bool joins = !runs.empty() && (tap.offset - runs.back().position) % gather.in_step == 0 &&
                       (tap.offset - runs.back().position) / gather.in_step <= runs.back().length;
    if (!joins) runs.push_back({slots, tap.offset, 0});
    Run& run = runs.back();
    const int64_t start = (tap.offset - run.position) / gather.in_step;
    run.length = std::max(run.length, start + length);
    base[static_cast<size_t>(tap.index)] = run.slot + start;
    slots = run.slot + run.length;
  }
}

int64_t AxisWindow::position(int64_t slot, int64_t in_step) const {
  size_t i = runs.size() - 1;
  while (runs[i].slot > slot) --i;
  return runs[i].position + (slot - runs[i].slot) * in_step;
}

PackedRun::PackedRun(const AxisWindow::Run& run, const ConvGather& gather, int64_t origin, int64_t stride)
    : slot(run.slot), length(run.length), step(gather.in_step * stride) {
  const int64_t first = run.position + origin * gather.in_step;
  begin = first >= 0 ? 0 : std::min(length, divide_up(-first, gather.in_step));
  if (first < gather.in_size) end = divide_up(gather.in_size - first, gather.in_step);
  end = std::clamp(end, begin, length);
  start = first * stride + begin * step;
}

std::array<int64_t, 3> Tiling::origin(int64_t index) const {
  return {index / (pieces[1] * pieces[2]) * length[0], index / pieces[2] % pieces[1] * length[1],
          index % pieces[2] * length[2]};
}

Tiling make_tiling(const Gather3& gather, const Triple& kernel, const TilingLimits& limits) {
  Tiling tiling;
  std::array<int64_t, 3>&length = tiling.length, &pieces = tiling.pieces;
  std::vector<AxisWindow>& windows = tiling.windows;
  auto set_length = [&](size_t axis, int64_t max_length) {
    const int64_t steps = gather[axis].steps();
    length[axis] = even_piece(steps, std::max<int64_t>(1, max_length));
    pieces[axis] = steps == 0 ? 0 : (steps + length[axis] - 1) / length[axis];
    windows[axis] = AxisWindow(gather[axis], kernel[static_cast<int>(axis)], length[axis]);
  };
  windows.resize(3);
  for (size_t axis = 0; axis < 3; ++axis) set_length(axis, gather[axis].steps());
  while (true) {
    const bool too_large = tiling.slots() > limits.slots || length[0] * length[1] * length[2] > limits.steps;
    // Shorten the longer of d and h. Neighboring tiles read their common border twice, and the border of a square is
    // smallest.
    const size_t longer = length[0] >= length[1] ? 0 : 1;
    const size_t axis = length[longer] > 1 ? longer : 2;
    const bool too_few = tiling.count() < limits.tiles && axis != 2;
    if (length[axis] <= 1 || !(too_large || too_few)) return tiling;
    set_length(axis, length[axis] - std::max<int64_t>(1, length[axis] / 16));
  }
}

}  // namespace voxgrad::cpu
