// What the planner of the convolutions chose, in words.
#include <cstdio>

#include "core/error.h"
#include "cuda/conv/small_channel/plan.h"
#include "cuda/kernels.h"

namespace voxgrad::cuda {
namespace {

// Of one H200, where nothing else limits: measured (TF32 at the clock that it keeps, halves, memory), or a third of
// TF32's for three products.
constexpr double kTf32Rate = 402e12, kHalfRate = 797e12, kDoubleRate = 67e12, kByteRate = 4.23e12;

std::string volume(const int (&size)[3]) { return concat(size[0], " x ", size[1], " x ", size[2]); }

std::string in_mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string describe(const ConvProblem& p, const GatherPlan& plan) {
  int64_t blocks = p.batch * p.groups * plan.column_tiles;
  for (const int tiles : plan.tiles) blocks *= tiles;
  if (p.direction == ConvDirection::transposed) blocks *= plan.classes / plan.slots;
  return concat(
      "tensor cores, ", name(arithmetic_of(p)), plan.wgmma ? " by wgmma" : " by mma.sync", ": tile of ",
      volume(plan.box), " results x ", plan.slots > 1 ? "2 phases x " : "", plan.columns, " channels, input of ",
      volume(plan.extent), plan.slide > 1 ? concat(", sliding along ", plan.range, " planes") : "", ", ", plan.classes,
      p.direction == ConvDirection::transposed ? " phases" : " residues", ", ", plan.chunks, " chunks of channels, ",
      blocks, plan.wgmma ? " boxes" : " blocks", ", workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const WeightPlan& plan) {
  const int64_t blocks = plan.ranges * p.groups * plan.row_tiles * plan.column_tiles;
  return concat("tensor cores, ", name(arithmetic_of(p)), " by mma.sync: tile of ", plan.rows, " channels x ",
                plan.column_tiles, " pieces of ", plan.columns * 8, " (channel, tap), boxes of ", volume(plan.box),
                ", ", plan.ranges, " ranges of ", plan.range, " boxes, ", blocks, " blocks, workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const WeightWgmmaPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), " by wgmma: ", plan.versions, " taps x ", plan.row_octets * 8,
                " channels by ", plan.depth.taps, " x ", plan.height.taps, " x ", plan.sets, " taps x ",
                plan.column_octets * 8, " channels, ", plan.heights, " products of ", plan.columns,
                plan.by_steps ? " columns, of half the steps" : " columns", " a warpgroup, pillars of ", plan.depth.box,
                " x ", plan.height.box, " x ", plan.pairs * 8 * (p.dtype == DType::f32 ? 1 : 2), ", ", plan.x_slots,
                " planes, ", plan.ranges, " ranges of ", plan.range, " pillars, ", blocks_of(p, plan),
                " blocks, workspace ", in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p, const NarrowGatherPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), ", few channels: pillars of ", volume(plan.box),
                " results, input planes of ", plan.halo.lines, " x ", plan.halo.positions, ", ", plan.halo.slots,
                " planes, ", plan.axis[0].parts * plan.axis[1].parts * plan.axis[2].parts, " phases, ",
                plan.tiles[0] * plan.tiles[1] * p.batch * p.groups, " blocks, no workspace");
}

std::string describe(const ConvProblem& p, const NarrowWeightPlan& plan) {
  return concat("tensor cores, ", name(arithmetic_of(p)), ", few channels: pillars of ", volume(plan.box), ", ",
                plan.units, " taps of 8 channels by ", plan.columns, " channels, input planes of ", plan.x.lines, " x ",
                plan.x.positions, ", ", plan.x.slots, " planes, ", plan.ranges * p.groups, " blocks, workspace ",
                in_mib(workspace_bytes(p, plan)));
}

std::string describe(const ConvProblem& p) {
  if (p.direction == ConvDirection::weight) {
    if (const auto plan = plan_weight_narrow(p)) return describe(p, *plan);
    if (const auto plan = plan_weight_wgmma(p)) return describe(p, *plan);
    if (const auto plan = plan_weight(p)) return describe(p, *plan);
  } else {
    if (const auto plan = plan_gather_narrow(p)) return describe(p, *plan);
    if (const auto plan = plan_gather(p)) return describe(p, *plan);
  }
  if (p.dtype == DType::bf16 || p.dtype == DType::f16) {
    ConvProblem wide = p;
    wide.dtype = DType::f32;
    return "float32 copies, then " + describe(wide);
  }
  return p.direction == ConvDirection::weight ? "plain kernel, workspace at most 16 MiB or the weight's size"
                                              : "plain kernel, no workspace";
}

double flop_rate(const ConvProblem& p) {
  if (p.dtype == DType::f64) return kDoubleRate;
  switch (arithmetic_of(p)) {
    case ConvArithmetic::tf32:
      return kTf32Rate;
    case ConvArithmetic::tf32x3:
      return kTf32Rate / 3;
    default:
      return kHalfRate;
  }
}

}  // namespace

ConvExplanation explain(const ConvProblem& problem) { return {describe(problem), flop_rate(problem), kByteRate}; }

namespace kernel {

ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry) {
  switch (pass) {
    case ConvPass::forward:
      return explain(conv_problem(ConvDirection::forward, x, y, w, geometry));
    case ConvPass::backward_data:
      return explain(conv_problem(ConvDirection::transposed, y, x, w, geometry));
    default:
      return explain(conv_problem(ConvDirection::weight, x, y, w, geometry));
  }
}

}  // namespace kernel
}  // namespace voxgrad::cuda
