// Packs the weights for fprop_dgrad.cuh, fills in its table of taps, and launches it.
#include <algorithm>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/sm80/params.cuh"

namespace voxgrad::cuda {
namespace {

/// Lists the phases of each class, and the offset in the halo of each tap.
void list_taps(MmaSyncParams& p) {
  int count = 0;
  for (int c = 0; c < p.classes; ++c) {
    p.class_begin[c] = count;
    const AxisPhase* part[3];
    int phase[3], taps = 1;
    split_class(p.axis, c, phase);
    for (int a = 0; a < 3; ++a) {
      p.class_phase[c][a] = static_cast<uint8_t>(phase[a]);
      part[a] = &p.axis[a].phase[phase[a]];
      taps *= part[a]->taps;
    }
    for (int i = 0; i < taps; ++i) {
      int index = i, offset[3], residue = 0;
      for (int a = 2; a >= 0; --a) {
        const int fold = p.axis[a].fold;
        const int tap = take_digit(index, part[a]->taps);
        const int row = part[a]->start + tap * part[a]->step - part[a]->low * fold;  // at least 0
        if (a == 2) residue = row % fold;                                            // the other axes are not folded
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
  static_cast<MmaSyncShape&>(p) = plan;
  p.in = in.data;
  p.epilogue = EpilogueParams(epilogue);
  p.out = out.data;
  std::copy_n(in.stride, 5, p.in_stride);
  std::copy_n(out.stride, 5, p.out_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.transposed = problem.pass == ConvPass::dgrad;
  p.rounds = divide_up(plan.halo_voxels, kMmaSyncThreads);
  p.tile_voxels = 1;
  for (int a = 0; a < 3; ++a) {
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

/// The weights before they are packed. Strides are in elements.
struct UnpackedWeights {
  const void* data;
  int64_t group_stride;
  int64_t in_stride;
  int64_t out_stride;
  int64_t tap_stride[3];
};

/// Packs the weights in the order in which fprop_dgrad.cuh reads them:
///   (group, column tile, class of taps, k-block, tap of the class, block of 8 columns, lane, words of the lane).
/// The weights of a CTA are then contiguous. Channels after the last channel are zero. A fragment is the words of one
/// lane in one block of 8 columns. Launch: one thread per fragment in a 1-D grid-stride loop, kBlock threads per CTA.
/// No shared memory.
template <class Arithmetic>
__global__ void pack_weights_kernel(const __grid_constant__ MmaSyncParams p, const __grid_constant__ UnpackedWeights w,
                                    uint32_t* packed, int64_t fragments) {
  wait_for_previous_kernels();
  using Element = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kParts = Arithmetic::kParts;
  for (int64_t i = thread_index(); i < fragments; i += thread_count()) {
    int64_t group = i;
    const auto digit = [&](int base) { return static_cast<int>(take_digit(group, base)); };
    const int lane = digit(32), block = digit(p.columns / 8);
    int of_class = digit(p.k_blocks * p.class_begin[p.classes]);
    const int column = digit(p.column_tiles) * p.columns + block * 8 + lane / 4;
    int number = 0;  // class
    while (of_class >= p.k_blocks * p.class_begin[number + 1]) ++number;
    of_class -= p.k_blocks * p.class_begin[number];
    const int taps = p.class_begin[number + 1] - p.class_begin[number], k_block = of_class / taps;
    int index = of_class % taps, part[3];
    class_phases(p, number, part);
    int64_t tap = 0;
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& at = p.axis[a].phase[part[a]];
      tap += (at.tap_first + take_digit(index, at.taps) * int64_t{at.tap_step}) * w.tap_stride[a];
    }
    const Element* const from =
        static_cast<const Element*>(w.data) + group * w.group_stride + column * w.out_stride + tap;
    for (int half = 0; half < 2; ++half) {
      const int word = k_block * 8 + lane % 4 + half * 4;
      Element x[kElements];
      for (int e = 0; e < kElements; ++e) {
        const int channel = word * kElements + e;
        x[e] = channel < p.in_channels && column < p.out_channels ? from[channel * w.in_stride] : Element(0.0f);
      }
      uint32_t parts[kParts];
      Arithmetic::split(x, parts);
      for (int k = 0; k < kParts; ++k) packed[(i * kParts + k) * 2 + half] = parts[k];
    }
  }
}

/// Packs the weights. `packed` has workspace_bytes() of the plan.
void pack_weights(const View& w, const MmaSyncParams& p, const ConvProblem& problem, uint32_t* packed,
                  cudaStream_t stream) {
  const int in_axis = p.transposed ? 0 : 1;
  const UnpackedWeights weights{.data = w.data,
                                .group_stride = w.size[0] / problem.groups * w.stride[0],
                                .in_stride = w.stride[in_axis],
                                .out_stride = w.stride[1 - in_axis],
                                .tap_stride = {w.stride[2], w.stride[3], w.stride[4]}};
  const int64_t fragments = problem.groups * p.column_tiles * p.k_blocks * p.class_begin[p.classes] * p.columns * 4;
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    launch_kernel("conv: packing of weights", pack_weights_kernel<Arithmetic>, grid_size(fragments), kBlock, 0, stream,
                  p, weights, packed, fragments);
  });
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncPlan& plan, const Launch& launch) {
  if (!std::all_of(plan.axis, plan.axis + 3, [](const AxisPhases& axis) { return axis.complete; }))
    fill_bias(call.out, call.epilogue, launch);
  const Workspace packed(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  MmaSyncParams p = make_params(call.out, call.in, call.epilogue, problem, plan);
  p.weights = packed.as<uint4>();
  pack_weights(call.w, p, problem, packed.as<uint32_t>(), launch.stream);
  const int64_t blocks = number_tiles(p, problem, plan);
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    launch_fprop_dgrad_mma_sync<Arithmetic>(p, plan.columns, blocks, launch.stream);
  });
}

}  // namespace voxgrad::cuda
