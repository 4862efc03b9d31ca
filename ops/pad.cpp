// Padding in the modes reflect, replicate and circular. Each mode is a linear map along an axis (Resample), which the
// kernel `resample` applies.
#include "ops/pad.h"

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Checks the amounts for an axis of `in` elements. Returns the map of the axis and stores the size of the result in
/// `size`.
Resample padded_axis(PadMode mode, int64_t in, int64_t before, int64_t after, int64_t& size) {
  using enum Resample::Mode;
  constexpr Resample::Mode modes[] = {reflect, reflect, replicate, circular};
  const int64_t max_amount = mode == PadMode::reflect ? in - 1 : mode == PadMode::circular ? in : int64_t{1} << 31;
  check(before <= max_amount && after <= max_amount, "pad", "an axis of size ", in, " can be padded by at most ",
        max_amount, ", got ", before, " and ", after);
  check(before > -in && after > -in && in + before + after > 0, "pad", "amounts ", before, " and ", after,
        " remove all elements of an axis of size ", in);
  size = in + before + after;
  Resample map{.mode = modes[static_cast<int>(mode)]};
  map.padding = before;
  return map;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, PadMode mode) {
  constexpr const char* kNames[] = {"constant", "reflect", "replicate", "circular"};
  return out << kNames[static_cast<int>(mode)];
}

Tensor pad(const Tensor& x, const std::vector<int64_t>& amounts, PadMode mode, double value) {
  if (mode == PadMode::constant) return pad(x, amounts, value);
  check_floating("pad", x);
  const auto axes = static_cast<int64_t>(amounts.size() / 2);
  check(amounts.size() % 2 == 0 && axes >= 1 && axes <= 3 && (x.dim() == axes + 1 || x.dim() == axes + 2), "pad",
        "the number of amounts, ", amounts.size(), ", does not fit shape ", x.shape(),
        ": expected two amounts for each spatial axis of (N, C, spatial...) or (C, spatial...)");
  ResampleMaps maps;
  Triple size(1);
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t in = x.size(x.dim() - 1 - i);
    check_within_slab("pad", i < 2 || (amounts[4] == 0 && amounts[5] == 0));
    check(in > 0, "pad", "input has an empty spatial axis: ", x.shape());
    const auto at = static_cast<size_t>(2 * i);
    maps[static_cast<size_t>(2 - i)] =
        padded_axis(mode, in, amounts[at], amounts[at + 1], size[2 - static_cast<int>(i)]);
  }
  return resample_axes(x, axes, maps, size);
}

}  // namespace voxgrad
