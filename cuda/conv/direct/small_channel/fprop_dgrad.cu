// Host side of fprop_dgrad.cuh: the tables of units, and the launch.
#include "cuda/conv/direct/small_channel/fprop_dgrad.cuh"

#include <cstdlib>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {
namespace {

/// Fills the tables of units, for one phase of the height after another.
void list_units(SmallChannelParams& p, const SmallChannelPlan& plan) {
  const SmallChannelHalo& halo = plan.halo;
  const std::vector<int> read = read_along(plan.axis[2]);
  int pair = 0;
  for (int phase = 0; phase < p.axis[1].phases; ++phase) {
    const AxisPhase& high = p.axis[1].phase[phase];
    p.pair_begin[phase] = pair;
    int units = 0;
    for (int tap = 0; tap < high.taps; ++tap)
      for (const int along : read)
        for (int quad = 0; quad < plan.quads; ++quad, ++units) {
          const int offset = halo.offset(high.start + tap * high.step - halo.low[1], along - halo.low[2]);
          p.unit_offset[2 * pair + units] = static_cast<uint32_t>((offset + quad * 4 * halo.pitch) * 4);
          p.unit[2 * pair + units] = {high.tap_first + tap * high.tap_step, along, quad * 4};
        }
    if (units % 2) {  // completes the last pair with a unit whose weights are zero
      p.unit[2 * pair + units].channel = -4;
      p.unit_offset[2 * pair + units] = p.unit_offset[2 * pair + units - 1];
    }
    pair += (units + 1) / 2;
  }
  p.pair_begin[p.axis[1].phases] = pair;
  for (int i = 0; i < p.axis[2].phases; ++i) p.part_of[p.axis[2].phase[i].first] = static_cast<int8_t>(i);
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelPlan& plan, const Launch& launch) {
  const View &out = call.out, &in = call.in, &w = call.w, *bias = call.epilogue.bias;
  const int in_axis = call.pass == ConvPass::dgrad ? 0 : 1;  // the axis of the weights that is summed
  SmallChannelParams p{};
  p.in = describe_input(in, static_cast<int>(problem.in_channels), plan.halo);
  p.weight = w.data;
  p.weight_group = w.size[0] / problem.groups * w.stride[0];
  p.weight_in = w.stride[in_axis];
  p.weight_out = w.stride[1 - in_axis];
  std::copy_n(w.stride + 2, 3, p.weight_tap);
  p.bias = bias ? bias->data : nullptr;
  p.bias_stride = bias ? bias->stride[0] : 0;
  p.relu = call.epilogue.relu;
  p.out = out.data;
  std::copy_n(out.stride, 3, p.out_stride);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.height = static_cast<int>(out.size[3]);
  p.width = static_cast<int>(out.size[4]);
  std::copy_n(plan.tile, 3, p.tiles.tile);
  std::copy_n(plan.tiles, 3, p.tiles.tiles);
  p.tiles.count = plan.axis[0].count;
  p.tiles.groups = static_cast<int>(problem.groups);
  std::copy_n(plan.axis, 3, p.axis);
  p.tile_width = Divisor(plan.tile[2]);
  p.tile_voxels = plan.tile[1] * plan.tile[2];
  p.kernel_depth = static_cast<int>(w.size[2]);
  p.result_pitch = plan.result_pitch;
  p.pairs = Divisor(plan.pairs);
  p.phases = Divisor(plan.axis[2].out_step);
  p.tap_distance = Divisor(std::abs(plan.axis[2].phase[0].step));
  list_units(p, plan);
  const int64_t blocks = problem.batch * problem.groups * plan.tiles[0] * plan.tiles[1];
  with_float_arithmetic(arithmetic_of(problem), [&]<class Arithmetic, class Element, ConvArithmetic kKind>() {
    constexpr bool kThree = Arithmetic::kParts == 2;
    const auto queue = [&]<int kM16, int kN8>() {
      const auto launch_tile = [&]<int kBlocks>() {
        launch_fprop_dgrad_small_channel<SmallChannelTile<Arithmetic, Element, kKind, kM16, kN8, kBlocks>>(
            p, blocks, plan.shared_bytes, launch.stream);
      };
      if constexpr (!kThree && kN8 < 4)
        if (plan.blocks == 2) return launch_tile.template operator()<2>();
      launch_tile.template operator()<1>();
    };
    const auto with_columns = [&]<int kM16>() {
      if (plan.columns == 8) return queue.template operator()<kM16, 1>();
      plan.columns == 16 ? queue.template operator()<kM16, 2>() : queue.template operator()<kM16, 4>();
    };
    plan.row_tiles == 1 ? with_columns.template operator()<1>() : with_columns.template operator()<2>();
  });
}

}  // namespace voxgrad::cuda
