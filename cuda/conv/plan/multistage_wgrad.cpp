// Plans the weight gradient of channels-last float32 tensors: chooses the CTA tile and the splits of the voxels.
#include "cuda/conv/plan/multistage_wgrad.h"

#include <algorithm>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

// Constants of the cost model. Times are in clocks, and rates are in bytes per clock. kStaging and kProduct were fitted
// to the times of all tiles on an H200.
constexpr double kStaging = 3;            // time to stage one row or column of a stage
constexpr double kProduct = 1 / 18.0;     // time of the products of one row and one column of a stage
constexpr double kLatency = 700;          // latency of a stage
constexpr double kReduction = 4000;       // time to launch the second kernel
constexpr double kFromMemory = 2350;      // rate at which the tensors are read
constexpr double kReductionBytes = 2500;  // rate at which the partial sums are written and read

constexpr MultistageWgradTile kTiles[] = {{128, 128}, {64, 128}, {64, 64}};
// With three products, the parts of the operands need registers in addition to the accumulators.
constexpr MultistageWgradTile kTilesOfParts[] = {{64, 64}};

int64_t num_taps(const ConvProblem& p) { return p.kernel[0] * p.kernel[1] * p.kernel[2]; }

/// Returns whether the kernel can read both tensors in vectors of 4 channels with 32-bit offsets within a sample. A tap
/// in the padding may lie outside of the input.
bool is_supported(const ConvProblem& p) {
  if (p.dtype != DType::f32) return false;
  if (!p.in_channels_last || !p.out_channels_last || !p.in_aligned || !p.out_aligned) return false;
  if (p.in_channels % 4 != 0 || p.out_channels % 4 != 0 || p.batch == 0) return false;
  double in_extent = 0, out_extent = 0;
  for (int a = 0; a < 3; ++a) {
    const auto& [stride, padding, dilation, groups] = p.geometry;
    const int64_t last = (p.out_size[a] - 1) * stride[a] + padding[a] + (p.kernel[a] - 1) * dilation[a];
    in_extent += static_cast<double>(std::max(last, padding[a])) * static_cast<double>(std::abs(p.in_stride[a]));
    out_extent += static_cast<double>(p.out_size[a] * std::abs(p.out_stride[a]));
  }
  return std::max(in_extent, out_extent) < INT32_MAX && num_taps(p) * p.in_channels < INT32_MAX - 256;
}

/// Splits the voxels so that the CTAs fill all SMs `waves` times, and bounds the voxels of a split (most_voxels()).
void split(const ConvProblem& p, int waves, MultistageWgradPlan& plan) {
  const int64_t tiles = int64_t{plan.row_tiles} * plan.column_tiles * p.groups;
  const int64_t blocks = divide_up(plan.voxels, int64_t{MultistageWgradPlan::kVoxels});
  const int64_t ranges =
      std::clamp<int64_t>(kMultiprocessors * ctas_per_sm(plan.cta, three_products(p)) * waves / tiles, 1, blocks);
  const int64_t most = most_voxels(p) / MultistageWgradPlan::kVoxels;
  plan.voxels_of_range = static_cast<int>(std::min(divide_up(blocks, ranges), most)) * MultistageWgradPlan::kVoxels;
  plan.ranges = static_cast<int>(divide_up(plan.voxels, int64_t{plan.voxels_of_range}));
}

/// Returns the time in clocks according to the cost model.
double cycles(const ConvProblem& p, const MultistageWgradPlan& plan) {
  const auto& [rows, columns] = plan.cta;
  const double stage = kStaging * (rows + columns) + kProduct * (three_products(p) ? 4 : 1) * rows * columns;
  const int64_t ctas = int64_t{plan.row_tiles} * plan.column_tiles * p.groups * plan.ranges;
  const int64_t at_once = kMultiprocessors * ctas_per_sm(plan.cta, three_products(p));
  const double stages = plan.voxels_of_range / MultistageWgradPlan::kVoxels + MultistageWgradPlan::kStages - 1;
  const double compute = stages * std::max(static_cast<double>(divide_up(ctas, kMultiprocessors)) * stage,
                                           static_cast<double>(divide_up(ctas, at_once)) * kLatency);
  const double memory = static_cast<double>(p.batch * sample_bytes(p)) / kFromMemory;
  return std::max(compute, memory) + kReduction + 2 * static_cast<double>(workspace_bytes(p, plan)) / kReductionBytes;
}

}  // namespace

std::span<const MultistageWgradTile> multistage_wgrad_tiles(ConvArithmetic arithmetic) {
  if (arithmetic == ConvArithmetic::tf32) return kTiles;
  if (arithmetic == ConvArithmetic::tf32x3) return kTilesOfParts;
  return {};
}

std::optional<MultistageWgradPlan> plan_multistage_wgrad(const ConvProblem& p) {
  if (!is_supported(p)) return std::nullopt;
  std::optional<MultistageWgradPlan> best;
  for (const MultistageWgradTile& tile : multistage_wgrad_tiles(arithmetic_of(p))) {
    if (p.choice.kernel == ConvKernel::multistage_wgrad && p.choice.width > 0 &&
        (p.choice.width != tile.columns || p.choice.m_tiles != tile.rows / 64))
      continue;
    MultistageWgradPlan plan{.cta = tile};
    plan.voxels = p.batch * p.out_size[0] * p.out_size[1] * p.out_size[2];
    if (plan.voxels == 0 || plan.voxels > INT32_MAX - MultistageWgradPlan::kVoxels ||
        plan.shared_bytes() > p.shared_limit)
      continue;
    plan.row_tiles = static_cast<int>(divide_up(p.out_channels, tile.rows));
    plan.column_tiles = static_cast<int>(divide_up(num_taps(p) * p.in_channels, tile.columns));
    for (const int waves : {1, 2, 4}) {
      split(p, waves, plan);
      const int64_t ctas = int64_t{plan.row_tiles} * plan.column_tiles * p.groups * plan.ranges;
      if (ctas > INT32_MAX || (plan.ranges > 1 && workspace_bytes(p, plan) > kMaxSums)) continue;
      plan.cycles = cycles(p, plan);
      if (!best || plan.cycles < best->cycles) best = plan;
    }
  }
  return best;
}

int64_t workspace_bytes(const ConvProblem& p, const MultistageWgradPlan& plan) {
  return plan.ranges * p.groups * p.out_channels * p.in_channels * num_taps(p) * 4;
}

}  // namespace voxgrad::cuda
