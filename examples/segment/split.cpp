// Implements the split of labeled data into a training part and a validation part.
#include "examples/segment/split.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <random>

namespace segment {
namespace vg = voxgrad;

std::vector<size_t> validation_fold(size_t count) {
  if (count == 0) return {};
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  // This is the shuffle of NumPy's RandomState: the Fisher-Yates algorithm, starting at the end. To draw an index from
  // [0, i], RandomState draws random bits until their value is at most i.
  std::mt19937 random(12345);
  for (size_t i = count - 1; i > 0; --i) {
    const size_t mask = std::bit_ceil(i + 1) - 1;
    size_t j = random() & mask;
    while (j > i) j = random() & mask;
    std::swap(order[i], order[j]);
  }
  const size_t folds = std::min<size_t>(count, 5);
  order.resize((count + folds - 1) / folds);  // fold 0 is one of the larger folds if the folds differ in size
  std::sort(order.begin(), order.end());
  return order;
}

std::optional<Slab> find_slab(const vg::Tensor& label, const std::vector<int64_t>& scored) {
  constexpr double kMaxScore = 1.0 / 8;     // maximum contribution of a class to the score
  constexpr double kMaxFraction = 1.0 / 4;  // slabs with a larger fraction of a class are excluded
  const vg::Shape shape = label.shape();
  Slab slab;
  for (int64_t axis = 1; axis < 3; ++axis)
    if (shape[axis] > shape[slab.axis]) slab.axis = axis;
  const int64_t length = shape[slab.axis];
  slab.size = std::max<int64_t>(length / 48, 1);

  // before[i][c]: voxels of class c in the slices below i.
  std::vector<std::array<int64_t, 256>> before(static_cast<size_t>(length) + 1);
  for (int64_t i = 0; i < length; ++i) {
    auto& sums = before[static_cast<size_t>(i) + 1];
    sums = before[static_cast<size_t>(i)];
    for (const auto number : label.select(slab.axis, i).contiguous().to_vector<int64_t>())
      ++sums[static_cast<size_t>(number)];
  }

  double best = 0;
  std::optional<Slab> found;
  for (slab.start = 0; slab.start + slab.size <= length; ++slab.start) {
    const auto& first = before[static_cast<size_t>(slab.start)];
    const auto& last = before[static_cast<size_t>(slab.start + slab.size)];
    double score = 0;
    bool allowed = true;
    for (const int64_t c : scored) {
      const auto i = static_cast<size_t>(c);
      if (before.back()[i] == 0) continue;
      const double part = static_cast<double>(last[i] - first[i]) / static_cast<double>(before.back()[i]);
      score += std::min(part, kMaxScore);
      allowed = allowed && part <= kMaxFraction;
    }
    if (!allowed || score <= best) continue;
    best = score;
    found = slab;
  }
  return found;
}

std::string describe(const Slab& slab) {
  constexpr std::array kAxes{"z", "y", "x"};
  return vg::concat("slices ", slab.start, " to ", slab.start + slab.size - 1, " along ",
                    kAxes[static_cast<size_t>(slab.axis)]);
}

vg::Tensor ignore_inside(const vg::Tensor& label, const Slab& slab, int64_t ignore_index) {
  vg::Tensor result = label.clone();
  result.narrow(slab.axis, slab.start, slab.size).fill_(static_cast<double>(ignore_index));
  return result;
}

vg::Tensor ignore_outside(const vg::Tensor& label, const Slab& slab, int64_t ignore_index) {
  vg::Tensor result = vg::full(label.shape(), static_cast<double>(ignore_index), label.options());
  result.narrow(slab.axis, slab.start, slab.size).copy_(label.narrow(slab.axis, slab.start, slab.size));
  return result;
}

}  // namespace segment
