// Decides which problems the kernels for few input channels support, and chooses their CTA tiles.
#include "cuda/conv/plan/few_inputs.h"

#include <algorithm>
#include <cmath>

#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

constexpr int kMultiprocessorBytes = 228 * 1024;  // shared memory of all CTAs of an SM

/// Returns the results that a CTA tile may have.
int max_results(const ConvProblem& p, int channels) {
  return p.pass == ConvPass::wgrad ? kFewInputsWgradVoxels : kFewInputsWarps * 16 * few_inputs_m16(channels);
}

bool supports(const ConvProblem& p) {
  if (p.pass == ConvPass::dgrad || p.dtype == DType::f64 || p.groups != 1) return false;
  if (three_products(p)) return false;
  if (!p.out_dense || !p.out_aligned || p.out_channels * item_size(p.dtype) % 16 != 0) return false;
  int64_t taps = p.in_channels;
  for (int a = 0; a < 3; ++a) {
    if (p.in_size[a] < 1 || p.out_size[a] < 1 || p.in_size[a] > kMaxFewInputsSize || p.out_size[a] > kMaxFewInputsSize)
      return false;
    if (p.geometry.stride[a] > kMaxFewInputsSize || p.geometry.padding[a] > kMaxFewInputsSize ||
        p.geometry.dilation[a] > kMaxFewInputsSize || p.kernel[a] > kMaxFewInputsTaps)
      return false;
    taps *= p.kernel[a];
  }
  return p.batch >= 1 && p.in_channels >= 1 && p.in_channels <= kMaxFewInputs && taps > p.in_channels &&
         taps <= kMaxFewInputsTaps;
}

/// Returns true if 32-bit offsets in bytes reach all lines of a box, and all results of a tile.
bool has_near_voxels(const ConvProblem& p, const FewInputsPlan& plan) {
  double inputs = static_cast<double>(p.in_channels - 1) * std::abs(static_cast<double>(p.in_channel_stride));
  for (int a = 0; a < 2; ++a) inputs += (plan.box[a] - 1.0) * std::abs(static_cast<double>(p.in_stride[a]));
  const double plane = static_cast<double>(p.out_size[1]) * static_cast<double>(p.out_size[2]);
  return inputs * static_cast<double>(item_size(p.dtype)) <= INT32_MAX && plan.tile[0] * plane <= INT32_MAX;
}

/// Returns the clocks of a CTA tile. The constants are fitted clocks: for 32 inputs of a line, for a product of the
/// tensor cores, and for the tile as a whole.
double tile_cycles(const ConvProblem& p, const FewInputsPlan& plan) {
  const double loads = 100.0 / kFewInputsWarps * plan.rows * divide_up(plan.box[2], 32);
  if (p.pass == ConvPass::wgrad) {
    const double k_steps = max_results(p, plan.channels) / (p.dtype == DType::f32 ? 8.0 : 16.0) * plan.sets;
    return loads + 0.9 * k_steps * plan.channels / 16 * plan.columns / 8 + 1100;
  }
  return loads + plan.steps * few_inputs_m16(plan.channels) * (20 + 11 * plan.channels / 8) + 1700;
}

/// Sets the members that depend on the tile. Returns false if a CTA cannot compute the tile.
bool complete(const ConvProblem& p, FewInputsPlan& plan) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  const int size = static_cast<int>(item_size(p.dtype));
  double rows = static_cast<double>(p.in_channels), tiles = static_cast<double>(p.batch);
  for (int a = 0; a < 3; ++a) {
    const int64_t side = (plan.tile[a] - 1) * p.geometry.stride[a] + (p.kernel[a] - 1) * p.geometry.dilation[a] + 1;
    if (side > kMaxFewInputsSide) return false;
    plan.box[a] = static_cast<int>(side);
    if (a < 2) rows *= static_cast<double>(side);
    plan.tiles[a] = static_cast<int>(divide_up(p.out_size[a], int64_t{plan.tile[a]}));
    tiles *= plan.tiles[a];
  }
  if (rows * plan.box[2] * 4 > p.shared_limit || tiles > (1 << 30) || !has_near_voxels(p, plan)) return false;
  plan.rows = static_cast<int>(rows);
  const int voxels = max_results(p, plan.channels);
  int bytes = plan.rows * (plan.box[2] * 4 + kFewInputsRowBytes);
  int sums = 0;
  if (wgrad) {
    bytes += voxels * (plan.channels + 8) * size;
    sums = plan.sets * plan.channels * (plan.columns + 8) * 4;
  } else {
    bytes += plan.steps * (32 + plan.channels * 8 * 4) + plan.channels * 4;
    // The box begins at a multiple of 128 bytes. The results of halves pass through its memory.
    bytes += 128;
    if (size == 2) bytes += std::max(kFewInputsWarps * kStagedBytes - plan.rows * plan.box[2] * 4, 0);
  }
  plan.shared_bytes = std::max(bytes + voxels * kFewInputsVoxelBytes, sums);
  if (plan.shared_bytes > p.shared_limit) return false;
  const int resident = std::clamp(kMultiprocessorBytes / (plan.shared_bytes + 1024), 1, 2);
  const int64_t ctas = resident * (wgrad ? kMultiprocessors : int64_t{p.multiprocessors});
  plan.ranges =
      std::min(static_cast<int64_t>(tiles), std::max<int64_t>(ctas / (plan.channel_tiles * plan.set_tiles), 1));
  const int64_t per_sm = divide_up(plan.ranges * plan.channel_tiles * plan.set_tiles, kMultiprocessors);
  plan.cycles = static_cast<double>(divide_up(static_cast<int64_t>(tiles), plan.ranges) * per_sm) *
                tile_cycles(p, plan) * (resident == 1 ? 1.7 : 1);
  if (!wgrad) return true;
  const int64_t voxels_of_warps = static_cast<int64_t>(tiles) * voxels * plan.sets / kFewInputsWarps;
  plan.ranges = std::max(plan.ranges, divide_up(voxels_of_warps, int64_t{most_voxels(p)}));
  return plan.ranges == 1 || workspace_bytes(p, plan) <= kMaxSums;
}

}  // namespace

std::optional<FewInputsPlan> plan_few_inputs(const ConvProblem& p) {
  if (!supports(p)) return std::nullopt;
  const bool wgrad = p.pass == ConvPass::wgrad, halves = p.dtype != DType::f32;
  std::optional<FewInputsPlan> best;
  FewInputsPlan plan{};
  plan.taps = static_cast<int>(p.in_channels * p.kernel[0] * p.kernel[1] * p.kernel[2]);
  if (halves && wgrad) plan.half_distance = static_cast<int>(p.geometry.stride[2]);
  if (halves && !wgrad && p.kernel[2] > 1) plan.half_distance = static_cast<int>(p.geometry.dilation[2]);
  const int64_t words = p.in_channels * p.kernel[0] * p.kernel[1] * (halves ? divide_up(p.kernel[2], 2) : p.kernel[2]);
  plan.steps = static_cast<int>(divide_up(words, 8));
  for (plan.channels = 32; plan.channels <= 64; plan.channels += 32) {
    plan.channel_tiles = static_cast<int>(divide_up(p.out_channels, int64_t{plan.channels}));
    plan.columns = plan.taps <= 32 || plan.channels == 64 ? 32 : 64;
    plan.sets = 1;
    while (wgrad && plan.sets < kFewInputsWarps && plan.sets * plan.columns < plan.taps) plan.sets *= 2;
    plan.set_tiles = wgrad ? divide_up(plan.taps, plan.sets * plan.columns) : 1;
    const int voxels = max_results(p, plan.channels);
    for (const int width : {8, 16, 24, 32, 40, 48, 56, 64, 128})
      for (plan.tile[1] = 1; plan.tile[1] * width <= voxels; ++plan.tile[1]) {
        plan.tile[2] = width;
        plan.tile[0] = voxels / (plan.tile[1] * width);
        if (plan.tile[0] > 1 && plan.tile[0] > p.out_size[0]) continue;
        if (complete(p, plan) && (!best || plan.cycles < best->cycles)) best = plan;
      }
  }
  return best;
}

int64_t workspace_bytes(const ConvProblem& p, const FewInputsPlan& plan) {
  if (p.pass != ConvPass::wgrad) return 0;
  return plan.ranges * p.out_channels * plan.taps * int64_t{sizeof(float)};
}

}  // namespace voxgrad::cuda
