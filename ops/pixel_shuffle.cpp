#include "ops/pixel_shuffle.h"

#include "ops/checks.h"
#include "ops/shape.h"

namespace voxgrad {

namespace {

/// Checks the input and the factor. Returns the voxels of a block, r^axes.
int64_t block_size(const char* op, const char* factor, const Tensor& x, int64_t r) {
  check_defined(op, "input", x);
  check(x.dim() >= 3 && x.dim() <= 5, op, "input must be (N, C, L), (N, C, H, W) or (N, C, D, H, W), got ",
        describe(x));
  check(r > 0 && r < int64_t{1} << 20, op, factor, " must lie in [1, 2^20), got ", r);
  int64_t size = 1;
  for (int64_t i = 2; i < x.dim(); ++i) size *= r;
  return size;
}

bool is_channels_last(const Tensor& x) {
  return x.dim() > 3 && x.suggest_memory_format() == MemoryFormat::channels_last;
}

}  // namespace

Tensor pixel_shuffle(const Tensor& x, int64_t upscale_factor) {
  constexpr const char* op = "pixel_shuffle";
  const int64_t parts = block_size(op, "upscale_factor", x, upscale_factor);
  const int64_t axes = x.dim() - 2, r = upscale_factor;
  check(x.size(1) % parts == 0, op, "the ", x.size(1), " channels of ", x.shape(), " are no multiple of ", r, "^",
        axes);
  // (N, C, r, r, r, D, H, W), from which the axes are taken in the order of the result's memory.
  Shape split{x.size(0), x.size(1) / parts};
  for (int64_t i = 0; i < axes; ++i) split.push_back(r);
  for (int64_t i = 0; i < axes; ++i) split.push_back(x.size(i + 2));
  const bool last = is_channels_last(x);
  Dims order{0}, result{x.size(0)}, back{0, axes + 1};
  for (int64_t i = 0; i < axes; ++i) {
    order.push_back(2 + axes + i);
    order.push_back(2 + i);
    result.push_back(checked_product(op, x.size(i + 2), r));
    back.push_back(i + 1);
  }
  order.insert(last ? order.size() : 1, 1);
  result.insert(last ? result.size() : 1, split[1]);
  const Tensor y = reshape(permute(reshape(x, split), order), result);
  return last ? permute(y, back) : y;
}

Tensor pixel_unshuffle(const Tensor& x, int64_t downscale_factor) {
  constexpr const char* op = "pixel_unshuffle";
  const int64_t parts = block_size(op, "downscale_factor", x, downscale_factor);
  const int64_t axes = x.dim() - 2, r = downscale_factor;
  // (N, C, D, r, H, r, W, r), from which the axes are taken in the order of the result's memory.
  Shape split{x.size(0), x.size(1)}, result{x.size(0)};
  Dims order{0}, back{0, axes + 1};
  const bool last = is_channels_last(x);
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t size = x.size(i + 2);
    check(size % r == 0, op, "spatial sizes of ", x.shape(), " must be multiples of downscale_factor ", r);
    split.push_back(size / r);
    split.push_back(r);
    result.push_back(size / r);
    order.push_back(2 + 2 * i);
    back.push_back(i + 1);
  }
  int64_t channel = last ? order.size() : 1;
  result.insert(channel, checked_product(op, x.size(1), parts));
  order.insert(channel, 1);
  for (int64_t i = 0; i < axes; ++i) order.insert(++channel, 3 + 2 * i);
  const Tensor y = reshape(permute(reshape(x, split), order), result);
  return last ? permute(y, back) : y;
}

}  // namespace voxgrad
