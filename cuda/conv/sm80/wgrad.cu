// Host side of wgrad.cuh: table of taps, launch, and the second kernel of split-K.
#include "cuda/conv/sm80/wgrad.cuh"

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {
namespace {

/// The target of wgrad_reduce() (common/wgrad_reduce.cuh).
struct WgradReduction : MmaSyncWgradParams {
  void* weight;
  int64_t stride[5];
  int64_t elements;  // per range
  int64_t ranges;

  __device__ int64_t offset(int64_t element) const {
    int64_t row = element / 8;
    const int column = static_cast<int>(take_digit(row, columns));
    int number = 0;
    while (number + 1 < classes && column >= of_class[number + 1].column_begin) ++number;
    const TapClass& c = of_class[number];
    int block = column - c.column_begin;
    int tap = take_digit(block, c.taps);
    const int channel = block * 8 + static_cast<int>(element % 8);
    if (tap >= c.real_taps || channel >= in_channels) return kNoWeight;
    int64_t result = row * stride[0] + channel * stride[1];
    int phase[3];
    split_class(axis, number, phase);
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& part = axis[a].phase[phase[a]];
      result += (part.tap_first + take_digit(tap, part.taps) * int64_t{part.tap_step}) * stride[a + 2];
    }
    return result;
  }
};

/// Lists the classes, and the offset in the halo of each tap.
void list_classes(const MmaSyncWgradPlan& plan, MmaSyncWgradParams& p) {
  int tile = 0, column = 0, tap_begin = 0;
  for (size_t number = 0; number < plan.classes.size(); ++number) {
    const MmaSyncWgradPlan::Class& c = plan.classes[number];
    const int columns = plan.blocks8 * c.padded_taps;
    p.of_class[number] = {c.padded_taps, c.taps, tap_begin, columns, column, c.tile_columns, tile};
    tile += c.tiles;
    column += columns;
    int phase[3];
    split_class(p.axis, static_cast<int>(number), phase);
    const int elements = plan.extent[2] / (plan.run * plan.axis[2].fold);
    for (int i = 0; i < c.padded_taps; ++i) {
      int index = i < c.taps ? i : 0, offset[3];
      for (int a = 2; a >= 0; --a) {
        const AxisPhase& part = p.axis[a].phase[phase[a]];
        const int fold = p.axis[a].fold;
        const int row = part.start + take_digit(index, part.taps) * part.step - part.low * fold;
        offset[a] = row / fold;
        if (a == 2) offset[a] = (row % fold * elements + row / fold % elements) * plan.run + row / fold / elements;
      }
      p.tap_offset[tap_begin++] = ((offset[0] * plan.extent[1] + offset[1]) * plan.extent[2] + offset[2]) * 4;
    }
  }
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncWgradPlan& plan, const Launch& launch) {
  const View &w = call.w, &x = call.in, &y = call.out;
  MmaSyncWgradParams p{};
  static_cast<MmaSyncWgradShape&>(p) = plan;
  p.x = x.data;
  p.y = y.data;
  std::copy_n(x.stride, 5, p.x_stride);
  std::copy_n(y.stride, 5, p.y_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.groups = static_cast<int>(problem.groups);
  p.classes = static_cast<int>(plan.classes.size());
  p.stage_words = plan.shared_bytes / 4;
  for (int a = 0; a < 3; ++a) {
    p.k_tile[a] = Divisor(plan.k_tile[a]);
    p.extent[a] = Divisor(plan.extent[a]);
  }
  list_classes(plan, p);
  const int elements = w.dtype == DType::f32 ? 1 : 2;
  for (int k_block = 0; k_block < kMmaSyncKTileWords / 8; ++k_block) {
    int word = k_block * 8 * elements;
    const int x_word = p.k_tile[2].take_digit(word) / elements, row = p.k_tile[1].take_digit(word);
    p.k_block_offset[k_block] =
        word < plan.k_tile[0] ? ((word * plan.extent[1] + row) * plan.extent[2] + x_word) * 4 : 0;
  }

  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  p.partial = partial.as<float>();
  WgradReduction sum{p, w.data, {}, w.size[0] * p.columns * 8, plan.ranges};
  std::copy_n(w.stride, 5, sum.stride);
  const int64_t blocks = plan.ranges * p.groups * p.row_tiles * p.column_tiles;
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    launch_wgrad_mma_sync<Arithmetic>(p, plan.rows, blocks, plan.stages * plan.shared_bytes, launch.stream);
    reduce_ranges<typename Arithmetic::Element>(sum, launch.stream);
  });
}

}  // namespace voxgrad::cuda
