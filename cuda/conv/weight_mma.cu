// The weight gradient on tensor cores: plan, launch, and the sum of the ranges.
#include "cuda/conv/weight_mma.cuh"

#include "cuda/conv/gather.h"
#include "cuda/conv/plan_cache.h"
#include "cuda/conv/weight_wgmma.cuh"

namespace voxgrad::cuda {
namespace {

struct WeightSum {
  const float* partial;
  void* weight;
  int64_t row_stride, channel_stride, tap_stride[3];
  int in_channels, columns;
  int64_t rows, elements, ranges;  // elements: of a range
  int classes;
  AxisParts axis[3];
  WeightClass of_class[kWeightClasses];
  int real_taps[kWeightClasses];
};

constexpr int kSumColumns = 32, kSumSlices = 8;

/// Adds up the ranges in their order, in double: 8 slices, then the slices.
template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumSlices) weight_sum(const __grid_constant__ WeightSum p) {
  __shared__ double sums[kSumSlices][kSumColumns];
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns, slice = static_cast<int>(threadIdx.x) / kSumColumns;
  for (int64_t first = int64_t{blockIdx.x} * kSumColumns; first < p.elements;
       first += int64_t{gridDim.x} * kSumColumns) {
    const int64_t element = first + lane;
    const int64_t begin = p.ranges * slice / kSumSlices, end = p.ranges * (slice + 1) / kSumSlices;
    double sum = 0;
    if (element < p.elements) {
#pragma unroll 8
      for (int64_t r = begin; r < end; ++r) sum += static_cast<double>(p.partial[r * p.elements + element]);
    }
    __syncthreads();
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || element >= p.elements) continue;
    for (int i = 1; i < kSumSlices; ++i) sum += sums[i][lane];
    int64_t rest = element / 8;
    const int column = static_cast<int>(rest % p.columns);
    const int64_t row = rest / p.columns;
    int number = 0;
    while (number + 1 < p.classes && column >= p.of_class[number + 1].column_begin) ++number;
    const WeightClass& c = p.of_class[number];
    const int block = (column - c.column_begin) / c.taps;
    int tap = (column - c.column_begin) % c.taps;
    const int channel = block * 8 + static_cast<int>(element % 8);
    if (tap >= p.real_taps[number] || channel >= p.in_channels) continue;
    int64_t offset = row * p.row_stride + channel * p.channel_stride;
    for (int a = 2; a >= 0; --a) {
      const AxisPart& part = p.axis[a].part[number % p.axis[a].parts];
      number /= p.axis[a].parts;
      offset += (part.tap_first + tap % part.taps * int64_t{part.tap_step}) * p.tap_stride[a];
      tap /= part.taps;
    }
    static_cast<T*>(p.weight)[offset] = T(static_cast<float>(sum));
  }
}

void list_classes(const WeightPlan& plan, WeightMma& p) {
  int tile = 0, column = 0, tap_begin = 0;
  for (size_t number = 0; number < plan.classes.size(); ++number) {
    const WeightPlan::Class& c = plan.classes[number];
    const int columns = plan.blocks8 * c.padded_taps;
    p.of_class[number] = {c.padded_taps, tap_begin, columns, column, c.tile_columns, tile};
    tile += c.tiles;
    column += columns;
    const AxisPart* part[3];
    int rest = static_cast<int>(number);
    for (int a = 2; a >= 0; --a) {
      part[a] = &p.axis[a].part[rest % p.axis[a].parts];
      rest /= p.axis[a].parts;
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

/// Whether the 16 bytes from each fourth word on lie together in memory, and aligned.
bool has_quads(const View& y) {
  const auto aligned = [&](int64_t elements) { return elements * item_size(y.dtype) % 16 == 0; };
  return y.stride[4] == 1 && reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && aligned(y.stride[0]) &&
         aligned(y.stride[1]) && aligned(y.stride[2]) && aligned(y.stride[3]);
}

template <class Arithmetic>
void run(WeightMma& p, WeightSum& sum, const WeightPlan& plan, const Launch& launch) {
  const int64_t blocks = plan.ranges * p.groups * p.row_tiles * p.column_tiles;
  const Workspace partial(launch, static_cast<size_t>(plan.ranges * sum.elements) * sizeof(float));
  p.partial = partial.as<float>();
  sum.partial = p.partial;
  const auto launch_tiles = plan.wgmma ? launch_weight_wgmma<Arithmetic> : launch_weight_mma<Arithmetic>;
  launch_tiles(p, plan.rows, blocks, plan.table_bytes + plan.buffers * plan.shared_bytes, launch.stream);
  check_launch("conv weight gradient");
  weight_sum<typename Arithmetic::Element>
      <<<grid_size(sum.elements, kSumColumns), kSumColumns * kSumSlices, 0, launch.stream>>>(sum);
  check_launch("conv weight gradient: sum");
}

}  // namespace

bool weight_on_tensor_cores(const View& w, const View& x, const View& y, const ConvGeometry& geometry,
                            const Launch& launch) {
  ConvProblem problem = conv_problem(ConvDirection::weight, x, y, w, geometry);
  describe_device(problem, launch);
  const auto plan = remembered<plan_weight>(problem);
  if (!plan) return false;

  WeightMma p{};
  p.x = x.data;
  p.y = y.data;
  std::copy_n(x.stride, 5, p.x_stride);
  std::copy_n(y.stride, 5, p.y_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.groups = static_cast<int>(problem.groups);
  p.row_tiles = plan->row_tiles;
  p.column_tiles = plan->column_tiles;
  p.classes = static_cast<int>(plan->classes.size());
  p.columns = plan->columns;
  p.run = plan->run;
  p.halo_words = plan->halo_words;
  p.pitch = plan->pitch;
  p.buffers = plan->buffers;
  p.buffer_words = plan->shared_bytes / 4;
  p.box_words = plan->box_words;
  p.table_bytes = plan->table_bytes;
  p.y_quads = has_quads(y);
  p.boxes = plan->boxes;
  p.range = plan->range;
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = plan->axis[a];
    p.box[a] = Divisor(plan->box[a]);
    p.extent[a] = Divisor(plan->extent[a]);
    p.tiles[a] = plan->tiles[a];
  }
  list_classes(*plan, p);
  const int elements = w.dtype == DType::f32 ? 1 : 2;
  p.steps = (plan->box[0] * plan->box[1] * plan->box[2] + 8 * elements - 1) / (8 * elements);
  for (int step = 0; step < kBoxWords / 8; ++step) {
    int word = step * 8 * elements;
    const int x_word = p.box[2].take(word) / elements, row = p.box[1].take(word);
    p.step_offset[step] = word < plan->box[0] ? ((word * plan->extent[1] + row) * plan->extent[2] + x_word) * 4 : 0;
  }

  WeightSum sum{.partial = nullptr,
                .weight = w.data,
                .row_stride = w.stride[0],
                .channel_stride = w.stride[1],
                .tap_stride = {w.stride[2], w.stride[3], w.stride[4]},
                .in_channels = p.in_channels,
                .columns = p.columns,
                .rows = w.size[0],
                .elements = w.size[0] * p.columns * 8,
                .ranges = plan->ranges,
                .classes = p.classes,
                .axis = {},
                .of_class = {},
                .real_taps = {}};
  std::copy_n(p.axis, 3, sum.axis);
  std::copy_n(p.of_class, kWeightClasses, sum.of_class);
  for (int c = 0; c < p.classes; ++c) sum.real_taps[c] = plan->classes[c].taps;
  switch (arithmetic_of(problem)) {
    case ConvArithmetic::tf32:
      run<Tf32>(p, sum, *plan, launch);
      break;
    case ConvArithmetic::tf32x3:
      run<Tf32x3>(p, sum, *plan, launch);
      break;
    case ConvArithmetic::bf16:
      run<Bf16>(p, sum, *plan, launch);
      break;
    case ConvArithmetic::f16:
      run<F16>(p, sum, *plan, launch);
      break;
  }
  return true;
}

}  // namespace voxgrad::cuda
