// Decides which problems the kernels for few output channels support, and chooses their CTA tiles.
#include "cuda/conv/plan/few_outputs.h"

#include <algorithm>
#include <cmath>

#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

bool supports(const ConvProblem& p) {
  if (p.pass != ConvPass::dgrad || p.dtype == DType::f64 || p.groups != 1) return false;
  if (!p.wgmma || three_products(p) || p.batch < 1 || p.in_channels < 1 || p.out_channels < 1) return false;
  if (p.out_channels > kMaxFewOutputs || p.kernel[0] * p.kernel[1] * p.kernel[2] == 1) return false;
  if (!p.in_channels_last || !p.in_aligned || p.in_channels * item_size(p.dtype) % 16 != 0) return false;
  // Offsets within a plane have 32 bits.
  double inputs = 0,
         results = static_cast<double>(p.out_channels) * std::abs(static_cast<double>(p.out_channel_stride));
  for (int a = 0; a < 3; ++a) {
    if (p.in_size[a] < 1 || p.out_size[a] < 1 || p.in_size[a] > kMaxFewOutputsSize ||
        p.out_size[a] > kMaxFewOutputsSize)
      return false;
    if (p.geometry.dilation[a] != 1 || p.geometry.padding[a] > kMaxFewOutputsSize || p.kernel[a] > kMaxFewOutputsTaps ||
        p.geometry.stride[a] > kMaxFewOutputsTaps)
      return false;
    if (a == 0) continue;
    inputs += static_cast<double>(p.in_size[a]) * std::abs(static_cast<double>(p.in_stride[a]));
    results += static_cast<double>(p.out_size[a]) * std::abs(static_cast<double>(p.out_stride[a]));
  }
  return inputs * static_cast<double>(item_size(p.dtype)) <= INT32_MAX && results <= INT32_MAX;
}

/// Chooses the compiled kernel with the fewest products, for as many result channels of a CTA as possible.
bool choose_instance(const ConvProblem& p, FewOutputsPlan& plan) {
  for (plan.channel_tiles = 1; plan.channel_tiles <= p.out_channels; ++plan.channel_tiles) {
    plan.channels = static_cast<int>(divide_up(p.out_channels, int64_t{plan.channel_tiles}));
    int best = 0;  // products
    for (int i = 0; i < static_cast<int>(std::size(kFewOutputsInstances)); ++i) {
      const FewOutputsInstance& k = kFewOutputsInstances[i];
      if (k.step != p.geometry.stride[0] || k.depth < p.kernel[0]) continue;
      if (k.columns < plan.channels * p.kernel[1] * p.kernel[2]) continue;
      if (best > 0 && k.depth * k.columns >= best) continue;
      best = k.depth * k.columns;
      plan.instance = i;
    }
    if (best > 0) return true;
  }
  return false;
}

/// Sets the members that depend on the tile. Returns false if a CTA cannot compute the tile.
bool complete(const ConvProblem& p, FewOutputsPlan& plan) {
  const FewOutputsInstance& k = kFewOutputsInstances[plan.instance];
  double ctas = static_cast<double>(p.batch) * plan.channel_tiles, results = plan.channels;
  for (int a = 0; a < 3; ++a) {
    if (a > 0) plan.tile[a] = plan.inputs[a - 1] - plan.reach[a];
    if (plan.tile[a] < 1) return false;
    plan.tiles[a] = divide_up(plan.count[a], plan.tile[a]);
    ctas *= plan.tiles[a];
    if (a > 0) results *= static_cast<double>(plan.tile[a] * p.geometry.stride[a]);
  }
  const double bytes = results * kFewOutputsResultBytes + plan.channels * 4 + k.step * 4.0 * k.columns * k.pitch() +
                       2.0 * plan.chunks * (2 * k.depth - 1) * k.columns * 32 +
                       k.stages() * k.inputs() * kFewOutputsChunk;
  if (bytes > static_cast<double>(p.shared_limit) || ctas > (1 << 30)) return false;
  plan.shared_bytes = static_cast<int>(bytes);
  // Clocks of a plane: the slower one of copies and of products, sums and stores; both have a latency.
  const double passes = std::ceil(results / k.threads()) * k.step;
  const double products = plan.chunks * k.warps / 4.0 * k.m64 * k.depth * k.columns;
  const double sums = passes * (150 + k.warps * 10.0), stores = 0.5 * k.step * k.inputs() * k.columns / 16.0;
  const double copies = plan.chunks * k.inputs() * kFewOutputsChunk / 25.0;
  const double plane = 600 + std::max(copies, std::max(products, sums) + stores);
  const double start = 4000 + 600.0 * plan.chunks * 4 * (2 * k.depth - 1) * k.columns / k.threads();
  plan.cycles = std::ceil(ctas / kMultiprocessors) * ((plan.tile[0] + plan.reach[0]) * plane + start);
  return true;
}

constexpr int kMaxParts = 256;  // CTAs among which the depth is divided

/// Returns the plan for the planes at each depth.
std::optional<FewOutputsPlan> plan_direction(const ConvProblem& p, bool exchanged) {
  std::optional<FewOutputsPlan> best;
  FewOutputsPlan plan{};
  plan.exchanged = exchanged;
  if (!supports(p) || !choose_instance(p, plan)) return std::nullopt;
  plan.chunks = static_cast<int>(divide_up(p.in_channels * item_size(p.dtype), int64_t{kFewOutputsChunk}));
  for (int a = 0; a < 3; ++a) {
    const int64_t stride = p.geometry.stride[a], padding = p.geometry.padding[a];
    plan.reach[a] = static_cast<int>((p.kernel[a] - 1) / stride);
    plan.first[a] = static_cast<int>(padding / stride);
    plan.count[a] = static_cast<int>((p.out_size[a] - 1 + padding) / stride) - plan.first[a] + 1;
  }
  const int inputs = kFewOutputsInstances[plan.instance].inputs();
  for (plan.inputs[1] = 8; plan.inputs[1] <= inputs; plan.inputs[1] += 8) {
    plan.inputs[0] = std::min(inputs / plan.inputs[1], plan.count[1] + plan.reach[1]);
    for (int parts = 1; parts <= std::min(plan.count[0], kMaxParts); ++parts) {
      plan.tile[0] = divide_up(plan.count[0], parts);
      if (complete(p, plan) && (!best || plan.cycles < best->cycles)) best = plan;
    }
  }
  return best;
}

}  // namespace

ConvProblem exchange_depth_and_height(ConvProblem p) {
  for (Triple* triple : {&p.in_size, &p.out_size, &p.kernel, &p.geometry.stride, &p.geometry.padding,
                         &p.geometry.dilation, &p.in_stride, &p.out_stride})
    std::swap((*triple)[0], (*triple)[1]);
  return p;
}

std::optional<FewOutputsPlan> plan_few_outputs(const ConvProblem& p) {
  // The direction determines the order of sums, and must not depend on the batch or on the number of SMs.
  const bool exchanged = p.kernel[1] > p.kernel[0];
  const auto plan = [&](bool exchange) {
    return plan_direction(exchange ? exchange_depth_and_height(p) : p, exchange);
  };
  const auto preferred = plan(exchanged);
  return preferred ? preferred : plan(!exchanged);
}

}  // namespace voxgrad::cuda
