// Computes Dice coefficients.
#include "examples/segment/evaluate.h"

#include <algorithm>
#include <cmath>

namespace segment {
namespace vg = voxgrad;

std::vector<double> dice(const vg::Tensor& labels, const vg::Tensor& truth, int64_t classes, int64_t ignore_index) {
  vg::check(labels.shape() == truth.shape(), "segment", "labels ", labels.shape(), " and truth ", truth.shape(),
            " differ in shape");
  const vg::Tensor a = labels.to(vg::u8).contiguous(), b = truth.to(vg::u8).contiguous();
  std::vector<double> both(static_cast<size_t>(classes)), sum(both);
  const uint8_t *left = a.data<uint8_t>(), *right = b.data<uint8_t>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (right[i] == ignore_index) continue;
    vg::check(left[i] < classes && right[i] < classes, "segment", "class ", int{std::max(left[i], right[i])},
              " is out of range: there are ", classes, " classes");
    ++sum[left[i]];
    ++sum[right[i]];
    if (left[i] == right[i]) ++both[left[i]];
  }
  for (size_t c = 0; c < both.size(); ++c) both[c] = sum[c] > 0 ? 2 * both[c] / sum[c] : std::nan("");
  return both;
}

double mean_dice(const std::vector<double>& dice, const std::vector<int64_t>& scored) {
  double sum = 0;
  int count = 0;
  for (const int64_t c : scored)
    if (const double value = dice[static_cast<size_t>(c)]; !std::isnan(value)) {
      sum += value;
      ++count;
    }
  return sum / count;
}

}  // namespace segment
