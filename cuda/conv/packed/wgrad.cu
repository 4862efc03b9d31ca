// Wgrad on wgmma: plan, packing, launch, reduction of split-K.
#include "cuda/conv/packed/wgrad.cuh"

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/packed/pack.h"
#include "cuda/conv/plan_cache.h"
#include "cuda/conv/plan_common.h"
#include "cuda/conv/tensor_map.h"
#include "cuda/kernels.h"

namespace voxgrad::cuda {
namespace {

struct WgradReduction {
  const float* partial;
  void* weight;
  int64_t row_stride, channel_stride, tap_stride[3];
  int in_channels, columns;  // columns: in_channels, filled up
  int kernel[3];
  int64_t elements, ranges;  // elements: of a range

  __device__ int64_t offset(int64_t element) const {
    const int64_t channel = take_digit(element, columns), h = take_digit(element, kernel[1]);
    const int64_t d = take_digit(element, kernel[0]), w = take_digit(element, kernel[2]);
    return channel < in_channels ? element * row_stride + channel * channel_stride + d * tap_stride[0] +
                                       h * tap_stride[1] + w * tap_stride[2]
                                 : -1;
  }
};

/// Where a staged line of x stands: lines of a residue of the taps along height, consecutive.
int stage_line(int row, const PackedWgradPlan& plan, const WgradSharedMemory& memory) {
  const int tap_step = plan.height.tap_step;
  return row % tap_step * (memory.x_lines / tap_step) + row / tap_step;
}

/// x with one line after the other, at another place.
View contiguous(View x, void* data) {
  x.data = data;
  for (int a = 4; a >= 0; --a) x.stride[a] = a == 4 ? 1 : x.stride[a + 1] * x.size[a + 1];
  return x;
}

/// x: positions that a voxel and a tap read, in the order of the rows that are staged.
void describe_x(PackedWgradParams& p, const View& x, const ConvProblem& problem, const PackedWgradPlan& plan,
                const WgradSharedMemory& memory) {
  for (int a = 0; a < 5; ++a) p.x_stride[a] = x.stride[a] * static_cast<int64_t>(item_size(x.dtype));
  for (int a = 0; a < 3; ++a) p.x_size[a] = static_cast<int>(read_size(problem, a));
  p.x_channels = static_cast<int>(problem.in_channels);
  p.x_octets = divide_up(p.x_channels, 8);
  p.x_step = static_cast<int>(problem.geometry.stride[2]);
  const SlidingAxis& axis = plan.height;
  const int line = plan.x_shifts * plan.column_octets * memory.x_octet;  // bytes
  const int rows = axis.rows(axis.tile);
  const bool apart = axis.in_stride > axis.span * axis.in_step;  // voxels share no line; taps are neighbours
  p.residues = apart ? axis.span : axis.tap_step;
  p.lines = divide_up(rows, p.residues);
  p.full_residues = (rows - 1) % p.residues + 1;
  p.residue_at = axis.in_step;
  p.residue_to = apart ? line : p.lines * line;
  p.line_at = apart ? axis.in_stride : axis.tap_step * axis.in_step;
  p.line_to = apart ? axis.span * line : line;
  if (x.dtype != DType::f32) return;
  const int channels = plan.column_octets * 8, quads = 2 * plan.pairs;
  p.raw_at = memory.total - plan.raw_stages * memory.raw_stage;
  p.raw_stages = plan.raw_stages;
  p.raw_bytes = memory.raw_stage;
  p.raw_pitch = memory.raw_pitch;
  p.raw_line_at = p.line_at * p.x_stride[3];
  p.raw_residue_at = p.residue_at * p.x_stride[3];
  p.raw_line_to = channels * p.raw_pitch;
  p.chunks = memory.raw_pitch / 16;
  p.copied = std::min(kCopyThreads / p.chunks, channels);
  p.copy_shares = std::min(kCopyThreads / (p.chunks * p.copied), p.lines);
  p.copy_channel_at = p.copied * p.x_stride[1];
  p.copy_line_at = p.copy_shares * p.raw_line_at;
  p.copy_line_to = p.copy_shares * p.raw_line_to;
  p.copy_line_step = p.copy_shares * p.line_at;
  p.split_channels = std::min(kSplitThreads / quads, channels);
  p.shares = std::min(kSplitThreads / (quads * p.split_channels), p.lines);
}

/// Tells TMA of packed x, and how large a plane of a box is. Lines come after channels, whose stride is
/// larger, as they shall lie in shared memory.
void describe_packed_x(PackedWgradParams& p, const PackInputs& inputs, void* packed, int64_t samples, int64_t width) {
  p.x_octets_packed = 2 * inputs.k_blocks;
  const int64_t line = inputs.run, height = inputs.size[1], depth = inputs.size[0];
  const int64_t plane = line * height * kVoxelBytes, octet = plane * depth * p.x_step;
  p.packed_x = describe(
      PackedTensor{.data = packed,
                   .size = {line, p.x_octets_packed, height, samples * p.groups * p.x_octets_packed * p.x_step * depth},
                   .stride = {kVoxelBytes, octet, line * kVoxelBytes, plane},
                   .box = {static_cast<int>(width), p.column_octets, p.lines, 1},
                   .step = {1, 1, p.line_at, 1}},
      "conv weight gradient");
}

template <class Arithmetic>
void run(PackedWgradParams& p, WgradReduction& sum, View x, View y, const ConvProblem& problem,
         const PackedWgradPlan& plan, const WgradSharedMemory& memory, const Launch& launch, const PackNext& pack_x) {
  using Element = typename Arithmetic::Element;
  constexpr bool kHalves = Arithmetic::kElements == 2;
  for (StagedPlanes* planes : {&p.of_x, &p.of_y}) planes->part_bytes = planes->stage_bytes / Arithmetic::kParts;
  const int64_t of_x = plan.samples * input_bytes(problem, plan), of_y = packed_y_bytes(problem, plan);
  const Workspace inputs_memory(launch, static_cast<size_t>(of_x)), packed(launch, static_cast<size_t>(of_y));
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan) - of_x - of_y));
  PackInputs inputs{};
  if constexpr (kHalves) {
    inputs = pack_inputs_of(problem, x);
    describe_packed_x(p, inputs, inputs_memory.as<void>(), plan.samples, 16 * plan.pairs);
  }
  p.y = packed.as<char>();
  sum.partial = p.partial = partial.as<float>();
  const int64_t of_sample = plan.sliding_tiles / problem.batch,
                blocks = blocks_of(problem, plan) / plan.ranges;  // of a range
  for (int64_t done = 0; done < problem.batch; done += plan.samples) {
    p.samples = static_cast<int>(std::min(plan.samples, problem.batch - done));
    p.sliding_tiles = static_cast<int>(p.samples * of_sample);
    p.ranges = static_cast<int>(divide_up(p.sliding_tiles, plan.range));
    if (pack_x) {
      pack_x(inputs_memory.as<void>(), p.samples);
    } else if constexpr (kHalves) {
      inputs.batch = p.samples;
      pack_inputs<Arithmetic>(inputs, inputs_memory.as<void>(), launch.stream);
      check_launch("conv weight gradient: packing");
      inputs.in = static_cast<const Element*>(inputs.in) + p.samples * inputs.stride[0];
    } else {
      p.x = x.as<char>();
      if (of_x > 0) {
        View part = x;
        part.size[0] = p.samples;
        kernel::copy(contiguous(part, inputs_memory.as<void>()), part);
        p.x = inputs_memory.as<char>();
      }
    }
    pack_y<Arithmetic>(p, y, packed.as<char>(), launch.stream);
    launch_wgrad_wgmma<Arithmetic>(p, plan.columns, plan.products, p.ranges * blocks, memory.total, launch.stream);
    check_launch("conv weight gradient");
    for (View* view : {&x, &y})
      view->data = view->as<char>() + p.samples * view->stride[0] * static_cast<int64_t>(item_size(view->dtype));
    p.partial += p.ranges * (plan.by_k_blocks ? 2 : 1) * sum.elements;
  }
  reduce_ranges<Element>(sum, launch.stream);
}

}  // namespace

bool packed_wgrad(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch,
                  const PackNext& pack_x) {
  ConvProblem problem = conv_problem(ConvPass::wgrad, x, y, w, geometry);
  describe_device(problem, launch);
  const auto plan = remembered<plan_packed_wgrad>(problem);
  if (!plan) return false;
  const WgradSharedMemory memory = memory_of(problem, *plan);

  PackedWgradParams p{};
  describe_x(p, input_bytes(problem, *plan) > 0 ? contiguous(x, nullptr) : x, problem, *plan, memory);
  p.of_x = {memory.x_pitch, memory.x_octet, 0, memory.x_stage, plan->x_stages};
  p.of_y = {memory.y_pitch, memory.y_octet, 0, memory.y_stage, plan->y_stages};
  p.y_channels = static_cast<int>(problem.out_channels);
  p.depth = plan->depth;
  p.height = plan->height;
  for (int a = 0; a < 3; ++a) p.kernel[a] = static_cast<int>(problem.kernel[a]);
  p.padding = static_cast<int>(geometry.padding[2]);
  p.dilation = static_cast<int>(geometry.dilation[2]);
  p.groups = static_cast<int>(problem.groups);
  p.x_shifts = plan->x_shifts;
  p.x_shift_tiles = plan->x_shift_tiles;
  p.row_tiles = plan->row_tiles;
  p.column_tiles = plan->column_tiles;
  p.tap_step = plan->tap_step;
  p.shift = plan->shift;
  p.y_shifts = plan->y_shifts;
  p.row_octets = plan->row_octets;
  p.column_octets = plan->column_octets;
  p.pairs = plan->pairs;
  p.width_tiles = plan->width_tiles;
  p.k_blocks = plan->height.tile * plan->pairs;
  p.plane_products = plan->plane_products;
  p.by_k_blocks = plan->by_k_blocks;
  p.late = plan->late;
  for (int k_block = 0; k_block < p.k_blocks; ++k_block) {
    const int pair = k_block % plan->pairs, line = k_block / plan->pairs;
    const int stage = stage_line(line * plan->height.advance, *plan, memory);  // of x: the first line that it reads
    const int y_line = elements_of(problem) == 1 ? plan->row_octets * plan->y_shifts * 128 : 256 * plan->pairs;
    p.x_k_block_at[k_block] =
        (pair * 2 * memory.x_pitch + stage * plan->x_shifts * plan->column_octets * memory.x_octet) / 16;
    p.y_k_block_at[k_block] = (pair * 2 * memory.y_pitch + line * y_line) / 16;
  }

  WgradReduction sum{.partial = nullptr,
                     .weight = w.data,
                     .row_stride = w.stride[0],
                     .channel_stride = w.stride[1],
                     .tap_stride = {w.stride[2], w.stride[3], w.stride[4]},
                     .in_channels = p.x_channels,
                     .columns = p.x_octets * 8,
                     .kernel = {p.kernel[0], p.kernel[1], p.kernel[2]},
                     .elements = 0,
                     .ranges = plan->ranges * (plan->by_k_blocks ? 2 : 1)};
  sum.elements = w.size[0] * sum.columns * p.kernel[0] * p.kernel[1] * p.kernel[2];
  with_arithmetic(arithmetic_of(problem),
                  [&]<class Arithmetic>() { run<Arithmetic>(p, sum, x, y, problem, *plan, memory, launch, pack_x); });
  return true;
}

}  // namespace voxgrad::cuda
