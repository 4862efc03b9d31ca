// Implements the quality measures and the tiled inference.
#include "examples/superres/evaluate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace superres {
namespace vg = voxgrad;
namespace {

/// The position of a tile along one axis, in low-resolution voxels of the volume.
struct Span {
  int64_t start;      // first voxel of the tile
  int64_t keep_from;  // the result for voxels keep_from .. keep_to - 1 is taken from this tile
  int64_t keep_to;
};

/// Returns the positions of tiles of `tile` voxels that cover an axis of `size` voxels. The outer `margin` voxels of a
/// tile are not kept, except at the ends of the axis.
std::vector<Span> spans(int64_t size, int64_t tile, int64_t margin) {
  std::vector<Span> result;
  for (int64_t kept = 0; kept < size;) {
    const int64_t start = std::clamp<int64_t>(kept - margin, 0, size - tile);
    const int64_t end = start + tile >= size ? size : start + tile - margin;
    result.push_back({start, kept, end});
    kept = end;
  }
  return result;
}

vg::Tensor box_mean(const vg::Tensor& x) {
  return vg::avg_pool3d(x, {.kernel_size = 7, .stride = 1, .padding = 3, .count_include_pad = false});
}

}  // namespace

Score score(const vg::Tensor& result, const vg::Tensor& truth) {
  vg::NoGradGuard no_grad;
  const double peak = vg::amax(truth).item();
  const vg::Tensor mask = vg::gt(truth, vg::full({}, 0.05 * peak, truth.options())).to(truth.dtype());
  const double voxels = mask.to(vg::f64).sum().item();
  const auto masked_mean = [&](const vg::Tensor& x) { return (x * mask).to(vg::f64).sum().item() / voxels; };

  const vg::Tensor error = result - truth;
  Score out;
  out.psnr = 10 * std::log10(peak * peak / masked_mean(error * error));

  const double c1 = std::pow(0.01 * peak, 2), c2 = std::pow(0.03 * peak, 2);
  const vg::Tensor mean_a = box_mean(result), mean_b = box_mean(truth);
  const vg::Tensor var_a = box_mean(result * result) - mean_a * mean_a;
  const vg::Tensor var_b = box_mean(truth * truth) - mean_b * mean_b;
  const vg::Tensor cov = box_mean(result * truth) - mean_a * mean_b;
  const vg::Tensor ssim = (mean_a * mean_b * 2.0 + c1) * (cov * 2.0 + c2) /
                          ((mean_a * mean_a + mean_b * mean_b + c1) * (var_a + var_b + c2));
  out.ssim = masked_mean(ssim);
  return out;
}

vg::Tensor super_resolve(const SuperResolution& model, const vg::Tensor& low, int64_t tile, int64_t margin,
                         int64_t batch) {
  vg::NoGradGuard no_grad;
  const int64_t depth = low.size(2), height = low.size(3), width = low.size(4);
  const int64_t side = std::min({tile, depth, height, width});
  vg::check(margin >= 0 && 2 * margin < side, "super_resolve", "margin ", margin, " is too large for tiles of ", side,
            " voxels per side");
  const auto cut = [](vg::Tensor x, const std::array<int64_t, 3>& start, const std::array<int64_t, 3>& length) {
    for (int axis = 0; axis < 3; ++axis) x = x.narrow(axis + 2, start[axis], length[axis]);
    return x;
  };
  std::vector<std::array<Span, 3>> tiles;
  for (const Span& d : spans(depth, side, margin))
    for (const Span& h : spans(height, side, margin))
      for (const Span& w : spans(width, side, margin)) tiles.push_back({d, h, w});

  vg::Tensor out = vg::empty({1, 1, 2 * depth, 2 * height, 2 * width}, low.options());
  for (size_t first = 0; first < tiles.size(); first += static_cast<size_t>(batch)) {
    const size_t last = std::min(tiles.size(), first + static_cast<size_t>(batch));
    vg::Tensors inputs;
    for (size_t i = first; i < last; ++i)
      inputs.push_back(cut(low, {tiles[i][0].start, tiles[i][1].start, tiles[i][2].start}, {side, side, side}));
    const vg::Tensor results = model(vg::cat(inputs, 0));
    for (size_t i = first; i < last; ++i) {
      std::array<int64_t, 3> to{}, from{}, length{};
      for (size_t axis = 0; axis < 3; ++axis) {
        const Span& span = tiles[i][axis];
        to[axis] = 2 * span.keep_from;
        from[axis] = 2 * (span.keep_from - span.start);
        length[axis] = 2 * (span.keep_to - span.keep_from);
      }
      cut(out, to, length).copy_(cut(results.narrow(0, static_cast<int64_t>(i - first), 1), from, length));
    }
  }
  return out;
}

}  // namespace superres
