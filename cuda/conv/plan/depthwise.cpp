// Chooses the CTA tiles of depthwise convolutions.
#include <cmath>
#include <limits>

#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/depthwise.h"

namespace voxgrad::cuda {
namespace {

constexpr int64_t kMinChunk = 4;  // positions along the depth
// The depth is divided until there are this many CTAs per SM. Wgrad uses fewer CTAs, because each CTA stores partial
// sums.
constexpr int64_t kCtasPerSm = 12, kWgradCtasPerSm = 4;
constexpr int kReservedShared = 2 << 10;  // static shared memory and alignment
// Constants of the cost model, in clocks: for a product in a lane of a CTA that is alone on its SM and of CTAs that
// share the SM, and for a plane on tensor cores.
constexpr double kProduct = 4, kSharedProduct = 2;
constexpr double kMmaPlane = 1400, kMmaPlane5 = 2200;

bool is_depthwise(const ConvProblem& p) {
  const ConvGeometry& g = p.geometry;
  const auto equal = [](const Triple& sizes) { return sizes[0] == sizes[1] && sizes[1] == sizes[2]; };
  return p.groups > 1 && p.in_channels == 1 && p.out_channels == 1 && equal(p.kernel) && equal(g.stride) &&
         g.dilation == Triple{1} && (p.kernel[0] == 3 || p.kernel[0] == 5 || p.kernel[0] == 7) && g.stride[0] <= 2;
}

/// Sets the tile of a CTA with these patches, and returns an estimate of the time relative to other tiles.
double set_tile(const ConvProblem& p, DepthwisePlan& plan, std::array<int, 2> patches) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  const int patch[] = {kDepthwisePatch, wgrad ? depthwise_wgrad_columns(plan.kernel, plan.stride) : kDepthwisePatch};
  plan.patches = patches;
  int64_t covered = 1, read = 1;
  for (int a = 0; a < 2; ++a) {
    plan.tile[a] = patches[a] * patch[a];
    const int center = plan.kernel / 2;
    plan.box[a] = plan.transposed ? (plan.tile[a] - 1 + center) / 2 + center / 2 + 1
                                  : (plan.tile[a] - 1) * plan.stride + plan.kernel;
    plan.tiles[a + 1] = static_cast<int>(divide_up(p.out_size[a + 1], int64_t{plan.tile[a]}));
    covered *= plan.tiles[a + 1] * plan.tile[a];
    read *= int64_t{plan.tiles[a + 1]} * plan.box[a];
  }
  return static_cast<double>(covered) + 0.25 * static_cast<double>(read);
}

/// Returns the shared memory of a CTA.
int shared_bytes(const ConvProblem& p, const DepthwisePlan& plan) {
  const auto stage_bytes = [&](const std::array<int, 2>& box) {
    return round_up(depthwise_box_bytes(box, plan.channels, p.dtype), kDepthwiseAlignment);
  };
  const int planes = plan.stages * stage_bytes(plan.box), tile = stage_bytes(plan.tile);
  const int taps = plan.kernel * plan.kernel * plan.kernel * kDepthwiseWeightPitch * static_cast<int>(sizeof(float));
  const int outputs = plan.transposed ? 4 : 2;  // output planes of two steps
  if (p.pass != ConvPass::wgrad) return planes + taps + outputs * tile + kDepthwiseAlignment;
  const int y_planes = depthwise_y_stages(plan.kernel, plan.stride, plan.stages) * tile;
  return std::max(planes + y_planes, taps) + kDepthwiseAlignment;
}

/// Sets the largest number of stages with which several CTAs fit on an SM, but at least 2 stages. Returns false if a
/// single CTA with 2 stages does not fit.
bool choose_stages(const ConvProblem& p, DepthwisePlan& plan) {
  const int64_t ctas = p.pass == ConvPass::wgrad ? 1 : plan.kernel == 7 ? 2 : 3;
  for (plan.stages = kMaxDepthwiseStages;; --plan.stages) {
    plan.shared_bytes = shared_bytes(p, plan);
    const int64_t bytes = plan.shared_bytes + kReservedShared;
    if (bytes * ctas <= p.shared_limit || plan.stages == 2) return bytes <= p.shared_limit;
  }
}

/// Chooses the tile with the lowest estimate that fits into shared memory. Returns false if none fits.
bool choose_tile(const ConvProblem& p, DepthwisePlan& plan) {
  const int patches = p.pass == ConvPass::wgrad ? depthwise_wgrad_patches(plan.kernel) : kMaxDepthwiseWarps;
  double min_cost = std::numeric_limits<double>::infinity();
  std::array<int, 2> best{};
  for (int rows = 1; rows <= patches; rows *= 2)
    for (int columns = patches / rows; columns >= 1; columns /= 2) {
      const double cost = set_tile(p, plan, {rows, columns});
      if (cost >= min_cost || !choose_stages(p, plan)) continue;
      min_cost = cost;
      best = {rows, columns};
    }
  if (best[0] == 0) return false;
  set_tile(p, plan, best);
  return choose_stages(p, plan);
}

/// Splits the depth until there are enough CTAs. The sums of wgrad must not depend on the GPU.
void choose_chunk(const ConvProblem& p, DepthwisePlan& plan) {
  const int64_t depth = p.out_size[0];
  const int64_t planes = p.batch * plan.channel_blocks * plan.tiles[1] * plan.tiles[2];
  const int64_t ctas = p.pass == ConvPass::wgrad ? kWgradCtasPerSm * kMultiprocessors : kCtasPerSm * p.multiprocessors;
  const int64_t wanted = divide_up(ctas, planes);
  plan.chunk = static_cast<int>(round_up(std::max(divide_up(depth, wanted), kMinChunk), int64_t{plan.stride}));
  plan.tiles[0] = static_cast<int>(divide_up(depth, int64_t{plan.chunk}));
  plan.ctas = planes * plan.tiles[0];
  // Products of a lane of a CTA: each plane of the inputs is multiplied by the taps of kernel / stride planes of a
  // patch.
  const double read =
      plan.transposed ? static_cast<double>(plan.chunk) / 2 : static_cast<double>(plan.chunk) * plan.stride;
  const double products = (read + plan.kernel - 1) * kDepthwisePatch * kDepthwisePatch * plan.kernel * plan.kernel *
                          plan.kernel / plan.stride;
  plan.cycles =
      products * std::max(kProduct, kSharedProduct * std::ceil(static_cast<double>(plan.ctas) / kMultiprocessors));
}

/// Chooses tensor cores for halves with kernel size 3 or 5 and stride 1, unless more than half of the positions of the
/// tiles lie outside of the output. Returns whether the plan is complete. The matrices of 7^3 do not fit into
/// registers.
bool choose_tensor_cores(const ConvProblem& p, DepthwisePlan& plan) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  if (plan.kernel == 7 || item_size(p.dtype) != 2 || plan.stride != 1 || p.groups % kDepthwiseMmaChannels != 0)
    return false;
  int64_t covered = 1;
  for (int a = 0; a < 2; ++a) {
    plan.tile[a] = 16;
    plan.tiles[a + 1] = static_cast<int>(divide_up(p.out_size[a + 1], int64_t{16}));
    covered *= plan.tiles[a + 1] * 16;
  }
  if (covered > 2 * p.out_size[1] * p.out_size[2]) return false;
  plan.tensor_cores = true;
  plan.channels = kDepthwiseMmaChannels;
  plan.box = {20, 20};  // also for 3^3, which ignores the last two rows and columns
  plan.stages = DepthwiseMmaShared::buffers;
  plan.shared_bytes = DepthwiseMmaShared::bytes + kDepthwiseMmaAlignment;
  plan.channel_blocks = static_cast<int>(p.groups / plan.channels);
  // One CTA fits on an SM. A CTA also reads kernel - 1 planes of the halo, and starts in about the time of three
  // planes. The sums of wgrad must not depend on the GPU. For each plane, wgrad adds 32 products to an accumulator.
  const int64_t sms = wgrad ? kMultiprocessors : p.multiprocessors;
  const int64_t depth = p.out_size[0], columns = p.batch * plan.channel_blocks * plan.tiles[1] * plan.tiles[2];
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t parts = wgrad ? divide_up(depth, int64_t{most_voxels(p) / 32}) : 1; parts <= depth; ++parts) {
    const int64_t chunk = divide_up(depth, parts), rounds = divide_up(columns * parts, sms);
    if (const int64_t time = rounds * (chunk + plan.kernel + 2); time < least) {
      least = time;
      plan.chunk = static_cast<int>(chunk);
    }
    if (rounds * (plan.kernel + 3) > least) break;
  }
  plan.tiles[0] = static_cast<int>(divide_up(depth, int64_t{plan.chunk}));
  plan.ctas = columns * plan.tiles[0];
  plan.cycles = static_cast<double>(least) * (plan.kernel == 5 ? kMmaPlane5 : kMmaPlane);
  return true;
}

}  // namespace

std::optional<DepthwisePlan> plan_depthwise(const ConvProblem& p) {
  if (p.dtype == DType::f64 || !p.wgmma || !is_depthwise(p) || p.groups > INT32_MAX) return std::nullopt;
  if (!p.in_channels_last || !p.out_channels_last || !p.in_aligned || !p.out_aligned) return std::nullopt;
  for (int a = 0; a < 3; ++a)
    if (p.in_size[a] < 1 || p.out_size[a] < 1 || std::max(p.in_size[a], p.out_size[a]) > INT32_MAX / 4 ||
        p.geometry.padding[a] > INT16_MAX)
      return std::nullopt;
  DepthwisePlan plan;
  plan.kernel = static_cast<int>(p.kernel[0]);
  plan.stride = static_cast<int>(p.geometry.stride[0]);
  plan.transposed = p.pass == ConvPass::dgrad && plan.stride > 1;
  for (int a = 0; a < 3; ++a)
    if (plan.transposed && (p.geometry.padding[a] - plan.kernel / 2) % 2 != 0) return std::nullopt;
  if (p.pass != ConvPass::wgrad && p.groups * item_size(p.dtype) % 16 != 0) return std::nullopt;  // TMA stores 16 bytes
  if (!choose_tensor_cores(p, plan)) {
    plan.channels = kDepthwiseChannels;
    plan.channel_blocks = static_cast<int>(divide_up(p.groups, int64_t{kDepthwiseChannels}));
    if (!choose_tile(p, plan)) return std::nullopt;
    choose_chunk(p, plan);
  }
  plan.box_bytes = depthwise_box_bytes(plan.box, plan.channels, p.dtype);
  plan.stage_bytes = round_up(plan.box_bytes, kDepthwiseAlignment);
  return plan.ctas <= kMaxUnits ? std::optional(plan) : std::nullopt;
}

int64_t workspace_bytes(const ConvProblem& p, const DepthwisePlan& plan) {
  if (p.pass != ConvPass::wgrad) return 0;
  const int64_t taps = int64_t{plan.kernel} * plan.kernel * plan.kernel;
  return plan.ctas / plan.channel_blocks * taps * p.groups * static_cast<int64_t>(sizeof(float));
}

}  // namespace voxgrad::cuda
