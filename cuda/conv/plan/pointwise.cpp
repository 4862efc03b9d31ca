// Plans pointwise convolutions: checks whether the kernels support a problem, and computes the number of CTAs.
#include "cuda/conv/plan/pointwise.h"

#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

constexpr double kFmaRate = 0.5 * 128 * kMultiprocessors;  // products that all SMs add per clock
constexpr int64_t kMaxTiles = 256;  // tiles of a warp of wgrad: a float adds at most 2048 voxels, or 256 sums of
                                    // products on tensor cores
constexpr int kMaxStaticBytes = 21 * 1024;  // static shared memory, and shared memory of the system

bool is_pointwise(const ConvProblem& p) {
  bool pointwise = p.groups == 1;
  for (int a = 0; a < 3; ++a)
    pointwise &= p.kernel[a] == 1 && p.geometry.stride[a] == 1 && p.geometry.padding[a] == 0 &&
                 p.in_size[a] == p.out_size[a];  // excludes output padding
  return pointwise;
}

void plan_ranges(const ConvProblem& p, PointwisePlan& plan) {
  const int width = 16 / static_cast<int>(item_size(p.dtype));
  const int groups = divide_up(plan.wide, plan.planes ? 16 : kPointwiseLanes * width);
  // With at most half of the warps for the wide channels of a range, few warps are idle.
  plan.grid_rows = divide_up(groups, plan.planes ? kPointwiseWgradWarps / 2 : kPointwiseWgradWarps);
  plan.groups = divide_up(groups, plan.grid_rows);
  const int64_t warps = kPointwiseWgradWarps / plan.groups,
                tiles =
                    plan.planes ? p.batch * plan.tiles : divide_up(plan.voxels, pointwise_wgrad_voxels(plan.narrow));
  plan.blocks = std::max(std::min(divide_up(tiles, warps), kMultiprocessors), divide_up(tiles, warps * kMaxTiles));
  if (!plan.planes) plan.cycles = macs(p) / kFmaRate;
}

/// Chooses the number of CTAs of fprop and dgrad for `tiles` tiles. A CTA has `bytes` bytes of shared memory, and the
/// registers suffice for `most` CTAs per SM.
void set_blocks(const ConvProblem& p, int64_t tiles, int64_t bytes, int64_t most, PointwisePlan& plan) {
  const int64_t resident = std::clamp<int64_t>(p.shared_limit / (bytes + 1024), 1, most);
  plan.blocks = std::min<int64_t>(divide_up(tiles, kPointwiseWarps), int64_t{p.multiprocessors} * resident);
}

/// Chooses the chunks of a stage and the grid of fprop and dgrad. At least two CTAs should fit on an SM.
void plan_grid(const ConvProblem& p, PointwisePlan& plan) {
  const auto item_bytes = static_cast<int>(item_size(p.dtype));
  const int chunk = kPointwiseLanes * 16 / item_bytes;
  // Words of weights of a wide channel.
  const int columns =
      plan.wide_in ? 2 * item_bytes * divide_up(plan.narrow, 8) : 8 * divide_up(plan.narrow * item_bytes, 32);
  const auto bytes = [&](int chunks) {
    const int weights = round_up(plan.wide, chunks * chunk) * (columns + (plan.wide_in ? 0 : 1)) * 4;
    const int ring = kPointwiseStages * 64 * chunks, results = plan.narrow * item_bytes;  // bytes of a voxel
    return weights + (plan.wide_in ? kPointwiseWarps * kPointwiseVoxels * (ring + results) : 0);
  };
  const int tile =
      plan.wide_in ? 0 : kPointwiseWarps * kPointwiseVoxels * (columns + 4) * 4;  // in static shared memory
  const bool fit = 2 * (bytes(2) + tile + 1024) <= p.shared_limit && bytes(2) + kMaxStaticBytes <= p.shared_limit;
  plan.chunks_of_stage = plan.wide > chunk && fit ? 2 : 1;
  plan.shared_bytes = bytes(plan.chunks_of_stage);
  set_blocks(p, divide_up(plan.voxels, kPointwiseVoxels), plan.shared_bytes + tile,
             pointwise_ctas(plan.wide_in, item_bytes, plan.narrow), plan);
}

/// Chooses the grid of fprop and dgrad of contiguous tensors.
void plan_planes_grid(const ConvProblem& p, PointwisePlan& plan) {
  const int steps = round_up(divide_up(plan.wide, 16), kPlanesSteps), blocks = divide_up(plan.wide, 8),
            weights = (plan.wide_in ? steps * divide_up(plan.narrow, 8) : blocks) * 32 * kPlanesVectors *
                      static_cast<int>(item_size(p.dtype)),
            ring = kPointwiseWarps * kPointwiseStages * kPlanesSteps * kPlanesVectors * 512;
  const int bias = 8 * (plan.wide_in ? divide_up(plan.narrow, 8) : blocks) * static_cast<int>(sizeof(float));
  plan.shared_bytes = weights + bias + (plan.wide_in ? ring : 0);
  set_blocks(p, p.batch * plan.tiles, plan.shared_bytes + kPointwiseWarps * 1024,
             planes_ctas(plan.wide_in, item_size(p.dtype)), plan);
}

}  // namespace

std::optional<PointwisePlan> plan_pointwise(const ConvProblem& p) {
  if (p.dtype == DType::f64 || !is_pointwise(p)) return std::nullopt;
  const bool wide_in = p.in_channels > p.out_channels || (p.in_channels == p.out_channels && p.in_aligned);
  const int64_t narrow = std::min(p.in_channels, p.out_channels), wide = std::max(p.in_channels, p.out_channels);
  const int64_t voxels = p.in_size[0] * p.in_size[1] * p.in_size[2], item = item_size(p.dtype);
  const bool planes = p.in_planes && p.out_planes,
             dense = p.in_dense && p.out_dense && wide * item % 16 == 0 && (wide_in ? p.in_aligned : p.out_aligned);
  if (narrow < 1 || narrow > max_narrow_channels(p.pass, item, planes) || wide > kMaxPointwiseChannels ||
      p.batch * voxels < 1 || (!planes && !dense))
    return std::nullopt;
  PointwisePlan plan{.wide_in = wide_in,
                     .planes = planes,
                     .narrow = static_cast<int>(narrow),
                     .wide = static_cast<int>(wide),
                     .voxels = p.batch * voxels,
                     .tiles = divide_up(voxels * item, 16 * planes_tile(p.pass))};
  if (planes && p.batch * plan.tiles > (1 << 30)) return std::nullopt;
  if (p.pass == ConvPass::wgrad)
    plan_ranges(p, plan);
  else if (planes)
    plan_planes_grid(p, plan);
  else
    plan_grid(p, plan);
  return plan.shared_bytes + kMaxStaticBytes <= p.shared_limit ? std::optional(plan) : std::nullopt;
}

int64_t workspace_bytes(const ConvProblem& p, const PointwisePlan& plan) {
  return p.pass == ConvPass::wgrad ? plan.blocks * plan.narrow * plan.wide * int64_t{sizeof(float)} : 0;
}

}  // namespace voxgrad::cuda
