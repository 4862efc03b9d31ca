// Describes the plan of a convolution in words.
#include <cstdio>

#include "core/error.h"
#include "cuda/conv/plan/choose.h"
#include "cuda/conv/plan/common.h"
#include "cuda/detail/kernels.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

// Measured rates of an H200, in FLOP/s and bytes/s, for kernels that only one resource limits. The TF32 rate is that of
// the sustained clock.
constexpr double kTf32Rate = 402e12, kHalfRate = 797e12, kDoubleRate = 67e12, kByteRate = 4.23e12;
constexpr double kFmaRate = 61e12;  // float32 on CUDA cores

/// FLOP per clock and SM of dense products on tensor cores, by compute capability in ascending order. f64 is the rate
/// of CUDA cores if tensor cores do not support f64.
struct TensorCores {
  int capability;  ///< compute capability: 10 * major + minor
  double tf32;
  double half;
  double f64;
};
constexpr TensorCores kTensorCores[] = {
    {80, 1024, 2048, 128}, {86, 512, 1024, 4}, {89, 512, 1024, 4}, {90, 2048, 4096, 256}, {100, 4096, 8192, 128}};

std::string volume(const int (&size)[3]) { return concat(size[0], " x ", size[1], " x ", size[2]); }

std::string in_mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string describe(const ConvProblem& p, const MmaSyncPlan& plan) {
  int64_t ctas = p.batch * p.groups * (plan.merged ? 1 : plan.column_tiles);
  for (const int along : plan.tiles) ctas *= along;
  if (p.pass == ConvPass::dgrad && !plan.merged) ctas *= plan.classes;
  return concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync: CTA tile of ", volume(plan.tile),
                " results x ", plan.columns, " channels, halo of ", volume(plan.extent), ", ", plan.classes,
                p.pass == ConvPass::dgrad ? " phases" : " residues", ", ", plan.k_blocks, " k-blocks, ", ctas,
                " CTAs, workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const MmaSyncWgradPlan& plan) {
  const int64_t ctas = plan.ranges * p.groups * plan.row_tiles * plan.column_tiles;
  return concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync: CTA tile of ", plan.rows, " channels x ",
                plan.column_tiles, " pieces of ", plan.columns * 8, " (channel, tap), k-blocks of ",
                volume(plan.k_tile), " voxels, split-K of ", plan.ranges, " ranges of ", plan.range, ", ", ctas,
                " CTAs, workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const MultistageWgradPlan& plan) {
  const int64_t ctas = int64_t{plan.ranges} * p.groups * plan.row_tiles * plan.column_tiles;
  return concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync, channels-last: CTA tile of ", plan.cta.rows,
                " channels x ", plan.cta.columns, " (tap, channel), split-K of ", plan.ranges, " ranges of ",
                plan.voxels_of_range, " voxels, ", ctas, " CTAs, workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const SmallChannelPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), ", small channels: sliding tiles of ", volume(plan.tile),
                " results, input planes of ", plan.halo.lines, " x ", plan.halo.positions, ", ", plan.halo.stages,
                " stages, ", plan.axis[0].phases * plan.axis[1].phases * plan.axis[2].phases, " phases, ",
                plan.tiles[0] * plan.tiles[1] * p.batch * p.groups, " CTAs, no workspace");
}

std::string describe(const ConvProblem& p, const SmallChannelWgradPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), ", small channels: sliding tiles of ", volume(plan.tile),
                ", ", plan.units, " taps of 8 channels by ", plan.columns, " channels, input planes of ", plan.x.lines,
                " x ", plan.x.positions, ", ", plan.x.stages, " stages, ", plan.ranges * p.groups, " CTAs, workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const DepthwisePlan& plan) {
  const std::string unit =
      plan.tensor_cores ? concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync") : "CUDA cores, float32";
  return concat(unit, ", depthwise: CTA tile of ", plan.chunk, " x ", plan.tile[0], " x ", plan.tile[1],
                " positions x ", plan.channels, " channels, input planes of ", plan.box[0], " x ", plan.box[1], ", ",
                plan.stages, " stages, ", plan.ctas, " CTAs, workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const PointwisePlan& plan) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  const std::string unit = wgrad && !plan.planes
                               ? "CUDA cores, float32"
                               : concat("tensor cores, ", name(pointwise_arithmetic(p)), " by mma.sync");
  const int64_t tile = plan.planes ? planes_tile(p.pass) * 16 / item_size(p.dtype)
                       : wgrad     ? pointwise_wgrad_voxels(plan.narrow)
                                   : kPointwiseVoxels;
  return concat(unit, ", pointwise", plan.planes ? " of contiguous tensors: " : ": ", plan.wide, " by ", plan.narrow,
                " channels, tiles of ", tile, " voxels, ", plan.blocks * plan.grid_rows, " CTAs, workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const FewInputsPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync, few input channels: CTA tile of ",
                volume(plan.tile), " voxels x ", plan.channels, " channels, box of ", volume(plan.box), " inputs, ",
                plan.ranges * plan.channel_tiles * plan.set_tiles, " CTAs, workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const FewOutputsPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), " by wgmma, few output channels: CTA tile of ",
                plan.inputs[0], " x ", plan.inputs[1], " inputs x ", plan.channels, " channels, ",
                plan.tile[0] + plan.reach[0],
                plan.exchanged ? " planes along the height, " : " planes along the depth, ",
                plan.tiles[0] * plan.tiles[1] * plan.tiles[2] * p.batch * plan.channel_tiles, " CTAs, no workspace");
}

/// Describes the axes whose taps share a box.
const char* describe_halo(const bool (&halo)[3]) {
  if (halo[2]) return halo[0] ? "halo" : "halo of each plane";
  if (halo[1]) return "halo along depth and height";
  return halo[0] ? "halo along depth" : "a box for each tap";
}

std::string describe(const ConvProblem& p, const FpropDgradPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), " by wgmma, ",
                copied_bytes(p) > 0 ? "channels-last copies" : "channels-last", ": CTA tile of ", plan.tile[0], " x ",
                plan.tile[1], " x ", plan.tile[2], " x ", plan.tile[3], " results x ", plan.cta.columns, " channels, ",
                plan.unit_columns > 1 ? concat(plan.unit_columns, " such tiles in a work unit, ") : "",
                plan.cooperative ? "shared by two warpgroups, " : "", plan.cta.slide > 1 ? "sliding, " : "",
                plan.kept ? "weights in shared memory, " : "", describe_halo(plan.halo), ", k-blocks of ",
                plan.chunk_channels, " channels, ", plan.phases, plan.phases == 1 ? " phase, " : " phases, ",
                plan.units * plan.cluster, " work units, ", plan.cluster > 1 ? "weights shared by two CTAs, " : "",
                "split-K ", plan.splits, ", workspace ", in_mib(workspace_bytes(p, plan) + copied_bytes(p)));
}

std::string describe(const ConvProblem& p, const WgradPlan& plan) {
  const char* products = p.dtype != DType::f32 ? name(arithmetic_of(p))
                         : three_products(p)   ? "3x scaled f16"
                                               : "scaled f16";
  return concat("tensor cores, ", products, " by wgmma, channels-last: ", plan.sets.size(), " sets of taps x ",
                plan.chunks * plan.cta.chunk, " by ", plan.cta.columns, " channels, ",
                plan.cta.slide > 1 ? "sliding " : "", "CTA tile of ", plan.tile[0], " x ", plan.tile[1], " x ",
                plan.tile[2], " x ", plan.tile[3], " voxels, ", plan.units, " work units, split-K ", plan.splits,
                plan.direct && plan.splits > 1 ? " in a cluster" : "", ", workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, std::monostate) {
  return p.pass == ConvPass::wgrad ? "plain kernel, workspace at most 16 MiB or the weight's size"
                                   : "plain kernel, no workspace";
}

std::string describe(const ConvPlan& plan) {
  const std::string text = std::visit([&](const auto& family) { return describe(plan.problem, family); }, plan.family);
  switch (plan.rewrite) {
    case ConvRewrite::none:
      break;
    case ConvRewrite::width_as_channels:
      return "taps along the width as channels, " + text;
    case ConvRewrite::phases_as_channels:
      return "phases along the width as channels, " + text;
    case ConvRewrite::merged_groups:
      return concat(plan.merged_groups, " groups as one, ", text);
    case ConvRewrite::patches_as_channels:
      return "taps as channels of a copy of x, then " + describe(*plan.copies);
    case ConvRewrite::channels_last_copies:
      return "channels-last copies, then " + describe(*plan.copies);
    case ConvRewrite::mirrored:
      return "mirrored kernel, " + text;
    case ConvRewrite::float32_copies:
      return "float32 copies, then " + describe(*plan.copies);
  }
  return text;
}

/// Returns the nominal FLOP/s of the GPU for the arithmetic of the problem.
double peak_flop_rate(const ConvProblem& p, const ConvGpu& gpu) {
  const TensorCores* cores = kTensorCores;
  for (const TensorCores& of : kTensorCores)
    if (of.capability <= gpu.capability) cores = &of;
  return (p.dtype == DType::f64 ? cores->f64
          : is_half(p.dtype)    ? cores->half
                                : cores->tf32) *
         gpu.multiprocessors * gpu.clock;
}

/// Returns the measured rate of an H200, scaled by the nominal peaks of the GPU and of an H200.
double flop_rate(const ConvProblem& p, const ConvGpu& gpu) {
  auto plan = choose(p);
  while (plan->copies) plan = plan->copies;
  if (std::holds_alternative<DepthwisePlan>(plan->family))
    return kFmaRate * (gpu.multiprocessors * gpu.clock) / (ConvGpu().multiprocessors * ConvGpu().clock);
  const double measured = p.dtype == DType::f64 ? kDoubleRate : is_half(p.dtype) ? kHalfRate : kTf32Rate;
  const int products = p.dtype == DType::f32 && three_products(p) ? 3 : 1;
  return measured / products * (peak_flop_rate(p, gpu) / peak_flop_rate(p, {}));
}

}  // namespace

ConvExplanation explain(const ConvProblem& problem, const ConvGpu& gpu) {
  return {concat(describe(*choose(problem)), "; on ", gpu.name), flop_rate(problem, gpu),
          kByteRate * (gpu.byte_rate / ConvGpu().byte_rate)};
}

namespace kernel {

ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry) {
  const bool dgrad = pass == ConvPass::dgrad;
  return explain(conv_problem(pass, dgrad ? y : x, dgrad ? x : y, w, geometry), conv_gpu(w.device));
}

}  // namespace kernel
}  // namespace voxgrad::cuda
