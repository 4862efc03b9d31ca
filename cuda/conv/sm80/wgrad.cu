// Host side of wgrad.cuh: table of taps, launch, and the second kernel of split-K.
#include "cuda/conv/sm80/wgrad.cuh"

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/dispatch.h"

namespace voxgrad::cuda {
namespace {

/// The parameters of wgrad_reduce() (common/wgrad_reduce.cuh).
struct WgradReduction {
  const float* partial;
  void* weight;
  int64_t row_stride;
  int64_t channel_stride;
  int64_t tap_stride[3];
  int in_channels;
  int columns;
  int64_t elements;  // per range
  int64_t ranges;
  int classes;
  AxisPhases axis[3];
  TapClass of_class[kMaxMmaSyncClasses];
  int real_taps[kMaxMmaSyncClasses];

  /// Returns the offset in the weight gradient of an element of the partial sums, or -1 for padding.
  __device__ int64_t offset(int64_t element) const {
    int64_t rest = element / 8;
    const int column = static_cast<int>(rest % columns);
    const int64_t row = rest / columns;
    int number = 0;
    while (number + 1 < classes && column >= of_class[number + 1].column_begin) ++number;
    const TapClass& c = of_class[number];
    const int block = (column - c.column_begin) / c.taps;
    int tap = (column - c.column_begin) % c.taps;
    const int channel = block * 8 + static_cast<int>(element % 8);
    if (tap >= real_taps[number] || channel >= in_channels) return kNoWeight;
    int64_t result = row * row_stride + channel * channel_stride;
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& part = axis[a].phase[number % axis[a].phases];
      number /= axis[a].phases;
      result += (part.tap_first + tap % part.taps * int64_t{part.tap_step}) * tap_stride[a];
      tap /= part.taps;
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
    p.of_class[number] = {c.padded_taps, tap_begin, columns, column, c.tile_columns, tile};
    tile += c.tiles;
    column += columns;
    const AxisPhase* part[3];
    int rest = static_cast<int>(number);
    for (int a = 2; a >= 0; --a) {
      part[a] = &p.axis[a].phase[rest % p.axis[a].phases];
      rest /= p.axis[a].phases;
    }
    const int elements = plan.extent[2] / (plan.run * plan.axis[2].fold);
    for (int i = 0; i < c.padded_taps; ++i) {
      int index = i < c.taps ? i : 0, offset[3];
      for (int a = 2; a >= 0; --a) {
        const int fold = p.axis[a].fold;
        const int row = part[a]->start + index % part[a]->taps * part[a]->step - part[a]->low * fold;
        index /= part[a]->taps;
        offset[a] = row / fold;
        if (a == 2) offset[a] = (row % fold * elements + row / fold % elements) * plan.run + row / fold / elements;
      }
      p.tap_offset[tap_begin++] = ((offset[0] * plan.extent[1] + offset[1]) * plan.extent[2] + offset[2]) * 4;
    }
  }
}

template <class Arithmetic>
void run(MmaSyncWgradParams& p, WgradReduction& sum, const MmaSyncWgradPlan& plan, const Launch& launch) {
  const int64_t blocks = plan.ranges * p.groups * p.row_tiles * p.column_tiles;
  const Workspace partial(launch, static_cast<size_t>(plan.ranges * sum.elements) * sizeof(float));
  p.partial = partial.as<float>();
  sum.partial = p.partial;
  launch_wgrad_mma_sync<Arithmetic>(p, plan.rows, blocks, plan.stages * plan.shared_bytes, launch.stream);
  check_launch("conv weight gradient");
  reduce_ranges<typename Arithmetic::Element>(sum, launch.stream);
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const MmaSyncWgradPlan& plan, const Launch& launch) {
  const View &w = call.w, &x = call.in, &y = call.out;
  MmaSyncWgradParams p{};
  p.x = x.data;
  p.y = y.data;
  std::copy_n(x.stride, 5, p.x_stride);
  std::copy_n(y.stride, 5, p.y_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.groups = static_cast<int>(problem.groups);
  p.row_tiles = plan.row_tiles;
  p.column_tiles = plan.column_tiles;
  p.classes = static_cast<int>(plan.classes.size());
  p.columns = plan.columns;
  p.run = plan.run;
  p.halo_words = plan.halo_words;
  p.pitch = plan.pitch;
  p.stages = plan.stages;
  p.stage_words = plan.shared_bytes / 4;
  p.k_tiles = plan.k_tiles;
  p.range = plan.range;
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = plan.axis[a];
    p.k_tile[a] = Divisor(plan.k_tile[a]);
    p.extent[a] = Divisor(plan.extent[a]);
    p.tiles[a] = plan.tiles[a];
  }
  list_classes(plan, p);
  const int elements = w.dtype == DType::f32 ? 1 : 2;
  for (int k_block = 0; k_block < kMmaSyncKTileWords / 8; ++k_block) {
    int word = k_block * 8 * elements;
    const int x_word = p.k_tile[2].take_digit(word) / elements, row = p.k_tile[1].take_digit(word);
    p.k_block_offset[k_block] =
        word < plan.k_tile[0] ? ((word * plan.extent[1] + row) * plan.extent[2] + x_word) * 4 : 0;
  }

  WgradReduction sum{.partial = nullptr,
                     .weight = w.data,
                     .row_stride = w.stride[0],
                     .channel_stride = w.stride[1],
                     .tap_stride = {w.stride[2], w.stride[3], w.stride[4]},
                     .in_channels = p.in_channels,
                     .columns = p.columns,
                     .elements = w.size[0] * p.columns * 8,
                     .ranges = plan.ranges,
                     .classes = p.classes,
                     .axis = {},
                     .of_class = {},
                     .real_taps = {}};
  std::copy_n(p.axis, 3, sum.axis);
  std::copy_n(p.of_class, kMaxMmaSyncClasses, sum.of_class);
  for (int c = 0; c < p.classes; ++c) sum.real_taps[c] = plan.classes[c].taps;
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() { run<Arithmetic>(p, sum, plan, launch); });
}

}  // namespace voxgrad::cuda
