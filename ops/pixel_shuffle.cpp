// Rearrangement of channels into voxels and back. Both directions reshape the input, permute its axes and reshape the
// result.
#include "ops/pixel_shuffle.h"

#include <algorithm>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Checks the input and the factor r. Returns r to the power of the number of spatial axes.
int64_t block_size(const char* op, const char* factor, const Tensor& x, int64_t r) {
  check_defined(op, "input", x);
  check_batched(op, x);
  check(r > 0 && r < int64_t{1} << 20, op, factor, " must lie in [1, 2^20), got ", r);
  int64_t size = 1;
  for (int64_t i = 2; i < x.dim(); ++i) size *= r;
  return size;
}

/// Reshapes x to `split`, permutes its axes by `order` and reshapes it to `result`, with one copy. Keeps the memory
/// format of x. The channels of the result are the axes order[1] to order[channel_axes].
Tensor rearranged(const Tensor& x, const Shape& split, Dims order, Shape result, int64_t channel_axes) {
  const Tensor parts = reshape(x, split);
  if (x.dim() == 3 || x.suggest_memory_format() != MemoryFormat::channels_last)
    return reshape(permute(parts, order), result);
  std::rotate(order.begin() + 1, order.begin() + 1 + channel_axes, order.end());
  std::rotate(result.begin() + 1, result.begin() + 2, result.end());
  Dims back{0, x.dim() - 1};
  for (int64_t i = 1; i < x.dim() - 1; ++i) back.push_back(i);
  return permute(reshape(permute(parts, order), result), back);
}

}  // namespace

Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor) {
  constexpr const char* op = "pixel_shuffle";
  const int64_t r = upscale_factor, parts = block_size(op, "upscale_factor", x, r), axes = x.dim() - 2;
  check(x.size(1) % parts == 0, op, "the channel count ", x.size(1), " of ", x.shape(), " is not a multiple of ", r,
        "^", axes);
  Shape split{x.size(0), x.size(1) / parts}, result = split;  // split: (N, C, r, r, r, D, H, W)
  Dims order{0, 1};
  for (int64_t i = 0; i < axes; ++i) split.push_back(r);
  for (int64_t i = 0; i < axes; ++i) {
    split.push_back(x.size(i + 2));
    order.push_back(2 + axes + i);
    order.push_back(2 + i);
    result.push_back(checked_product(op, x.size(i + 2), r));
  }
  return rearranged(x, split, order, result, 1);
}

Tensor pixel_unshuffle(const Tensor& x, int64_t downscale_factor) {
  constexpr const char* op = "pixel_unshuffle";
  const int64_t r = downscale_factor, parts = block_size(op, "downscale_factor", x, r), axes = x.dim() - 2;
  Shape split{x.size(0), x.size(1)};  // (N, C, D, r, H, r, W, r)
  Shape result{x.size(0), checked_product(op, x.size(1), parts)};
  Dims order{0, 1};
  for (int64_t i = 0; i < axes; ++i) order.push_back(3 + 2 * i);
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t size = x.size(i + 2);
    check(size % r == 0, op, "spatial sizes of ", x.shape(), " must be multiples of downscale_factor ", r);
    split.push_back(size / r);
    split.push_back(r);
    order.push_back(2 + 2 * i);
    result.push_back(size / r);
  }
  return rearranged(x, split, order, result, 1 + axes);
}

}  // namespace voxgrad
