// Host side of fprop_dgrad.cuh: packing of the weights, table of taps, launch.
#include <algorithm>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/sm80/pack.h"
#include "cuda/conv/sm80/params.cuh"

namespace voxgrad::cuda {
namespace {

/// Lists the phases of each class, and the offset in the halo of each tap.
void list_taps(MmaSyncParams& p) {
  int count = 0;
  for (int c = 0; c < p.classes; ++c) {
    p.class_begin[c] = count;
    const AxisPhase* part[3];
    int number = c, taps = 1;
    for (int a = 2; a >= 0; --a) {
      p.class_phase[c][a] = static_cast<uint8_t>(number % p.axis[a].phases);
      part[a] = &p.axis[a].phase[p.class_phase[c][a]];
      number /= p.axis[a].phases;
      taps *= part[a]->taps;
    }
    for (int i = 0; i < taps; ++i) {
      int index = i, offset[3], residue = 0;
      for (int a = 2; a >= 0; --a) {
        const int fold = p.axis[a].fold;
        const int row = part[a]->start + index % part[a]->taps * part[a]->step - part[a]->low * fold;  // at least 0
        index /= part[a]->taps;
        if (a == 2) residue = row % fold;  // the other axes are not folded
        offset[a] = row / fold;
      }
      const int run = p.extent[2].value() / p.axis[2].fold;  // words of a residue in a line
      p.tap_offset[count++] = ((offset[0] * p.extent[1].value() + offset[1]) * p.line + residue * run + offset[2]) * 4;
    }
  }
  p.class_begin[p.classes] = count;
}

MmaSyncParams make_params(const View& out, const View& in, const ConvEpilogue& epilogue, const ConvProblem& problem,
                          const MmaSyncPlan& plan) {
  MmaSyncParams p{};
  p.in = in.data;
  p.epilogue = EpilogueParams(epilogue);
  p.out = out.data;
  std::copy_n(in.stride, 5, p.in_stride);
  std::copy_n(out.stride, 5, p.out_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.column_tiles = plan.column_tiles;
  p.k_blocks = plan.k_blocks;
  p.transposed = problem.pass == ConvPass::dgrad;
  p.halo_voxels = plan.halo_voxels;
  p.rounds = divide_up(plan.halo_voxels, kMmaSyncThreads);
  p.line = plan.line;
  p.pitch = plan.pitch;
  p.classes = plan.classes;
  p.merged = plan.merged;
  p.input_stages = plan.input_stages;
  p.tile_voxels = 1;
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = plan.axis[a];
    p.tile[a] = Divisor(plan.tile[a]);
    p.extent[a] = Divisor(plan.extent[a]);
    p.tile_voxels *= plan.tile[a];
  }
  list_taps(p);
  return p;
}

/// Sets the digits of a tile's number. Returns the number of tiles.
int64_t number_tiles(MmaSyncParams& p, const ConvProblem& problem, const MmaSyncPlan& plan) {
  const int column_tiles = p.merged ? 1 : p.column_tiles, phases = p.transposed && !p.merged ? p.classes : 1;
  const int groups = static_cast<int>(problem.groups);
  const int digits[] = {column_tiles, phases, plan.tiles[2], plan.tiles[1], plan.tiles[0], groups};
  int64_t tiles = problem.batch;
  for (int i = 0; i < 6; ++i) {
    p.digit[i] = Divisor(digits[i]);
    tiles *= digits[i];
  }
  return tiles;
}

PackWeights weights_of(const View& w, const MmaSyncParams& p, const ConvProblem& problem, const MmaSyncPlan& plan) {
  const int in_axis = p.transposed ? 0 : 1;
  PackWeights weights{.weight = w.data,
                      .group_stride = w.size[0] / problem.groups * w.stride[0],
                      .in_stride = w.stride[in_axis],
                      .out_stride = w.stride[1 - in_axis],
                      .tap_stride = {w.stride[2], w.stride[3], w.stride[4]},
                      .groups = static_cast<int>(problem.groups),
                      .in_channels = p.in_channels,
                      .out_channels = p.out_channels,
                      .columns = plan.columns,
                      .column_tiles = plan.column_tiles,
                      .k_blocks = plan.k_blocks,
                      .taps = p.class_begin[p.classes],
                      .axis = {}};
  std::copy_n(plan.axis, 3, weights.axis);
  return weights;
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncPlan& plan, const Launch& launch) {
  if (!std::all_of(plan.axis, plan.axis + 3, [](const AxisPhases& axis) { return axis.complete; }))
    fill_bias(call.out, call.epilogue, launch);
  const Workspace packed(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  MmaSyncParams p = make_params(call.out, call.in, call.epilogue, problem, plan);
  p.weights = packed.as<uint4>();
  const ConvArithmetic arithmetic = arithmetic_of(problem);
  pack_weights(weights_of(call.w, p, problem, plan), arithmetic, packed.as<void>(), launch.stream);
  const int64_t blocks = number_tiles(p, problem, plan);
  with_arithmetic(arithmetic, [&]<class Arithmetic>() {
    launch_fprop_dgrad_mma_sync<Arithmetic>(p, plan.columns, blocks, launch.stream);
  });
  check_launch("conv");
}

}  // namespace voxgrad::cuda
