#include "ops/pixel_shuffle.h"

#include "ops/checks.h"
#include "ops/shape.h"

namespace voxgrad {

Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor) {
  constexpr const char* op = "pixel_shuffle";
  check_defined(op, "input", x);
  check(x.dim() >= 3 && x.dim() <= 5, op, "input must be (N, C, L), (N, C, H, W) or (N, C, D, H, W), got ",
        describe(x));
  const int64_t axes = x.dim() - 2, r = upscale_factor;
  check(r > 0 && r < int64_t{1} << 20, op, "upscale_factor must lie in [1, 2^20), got ", r);
  int64_t parts = 1;
  for (int64_t i = 0; i < axes; ++i) parts *= r;
  check(x.size(1) % parts == 0, op, "the ", x.size(1), " channels of ", x.shape(), " are no multiple of ", r, "^",
        axes);
  // (N, C, r, r, r, D, H, W), from which the axes are taken in the order of the result's memory.
  Shape split{x.size(0), x.size(1) / parts};
  for (int64_t i = 0; i < axes; ++i) split.push_back(r);
  for (int64_t i = 0; i < axes; ++i) split.push_back(x.size(i + 2));
  const bool last = axes > 1 && x.suggest_memory_format() == MemoryFormat::channels_last;
  Dims order{0}, result{x.size(0)}, back{0, axes + 1};
  for (int64_t i = 0; i < axes; ++i) {
    order.push_back(2 + axes + i);
    order.push_back(2 + i);
    result.push_back(x.size(i + 2) * r);
    back.push_back(i + 1);
  }
  order.insert(last ? order.size() : 1, 1);
  result.insert(last ? result.size() : 1, split[1]);
  const Tensor y = reshape(permute(reshape(x, split), order), result);
  return last ? permute(y, back) : y;
}

}  // namespace voxgrad
