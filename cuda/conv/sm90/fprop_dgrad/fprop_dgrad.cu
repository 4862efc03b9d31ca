// Host side of kernel.cuh: tensor maps, the table of taps, launches, and the second kernel of split-K.
#include <algorithm>
#include <optional>

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/tensor_map.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/sm90/fprop_dgrad/epilogue.cuh"
#include "cuda/detail/kernels.h"
#include "cuda/vector.cuh"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

using namespace implicit_gemm;

/// Adds the partial sums of all splits. Each thread computes a vector of `width` channels and stores it in one
/// instruction if the channels are innermost.
template <class T, int width>
__global__ void __launch_bounds__(kBlock) reduce_splits(const __grid_constant__ ReduceParams p) {
  wait_for_previous_kernels();
  const int64_t vectors = p.channels / width, count = p.voxels * vectors;
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const int64_t voxel = p.voxels_first ? i % p.voxels : i / vectors;
    const int channel = static_cast<int>(p.voxels_first ? i / p.voxels : i - voxel * vectors) * width;
    float sum[width] = {};
    const float* from = p.partial + voxel * p.channels + channel;
#pragma unroll 4
    for (int split = 0; split < p.splits; ++split) {
      float x[width];
      load_values<width>(from + split * p.partial_stride, x);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += x[j];
    }
#pragma unroll
    for (int j = 0; j < width; ++j) {
      sum[j] = max_or_nan(sum[j] + p.epilogue.bias_of<T>(channel + j), p.epilogue.floor);
    }
    int64_t sample = voxel, offset = channel * p.channel_stride;
    for (int a = 0; a < 3; ++a) {
      offset += sample % p.size[a].value() * p.out_stride[3 - a];
      sample /= p.size[a].value();
    }
    T* const to = static_cast<T*>(p.out) + offset + sample * p.out_stride[0];
    if (p.voxels_first)
#pragma unroll
      for (int j = 0; j < width; ++j) to[j * p.channel_stride] = T(sum[j]);
    else
      store_values<width>(to, sum);
  }
}

/// Sets the taps of a sliding tile along the depth. The first block of columns belongs to the plane of results that the
/// current plane of inputs completes; the other blocks belong to the planes after it.
void list_blocks(Params& p, const AxisPhase& depth, int taps_of_a_plane) {
  const int last = depth.step > 0 ? depth.taps - 1 : 0;
  const int first_weight = (depth.tap_first + last * depth.tap_step) * taps_of_a_plane;
  p.slide_step = -depth.step * depth.tap_step * taps_of_a_plane;
  for (Tap& tap : p.tap) tap.weight = static_cast<uint16_t>(tap.weight + first_weight);
}

/// Lists the boxes of inputs and the taps that read each box.
void list_taps(Params& p, const FpropDgradPlan& plan, bool transposed) {
  const int stage = plan.stage_taps;
  const bool slides = plan.cta.slide > 1;
  const AxisPhases* axis = plan.axis;
  int loads = 0, taps = 0;
  const int parts[] = {axis[0].phases, axis[1].phases, axis[2].phases};
  const int pitch[] = {plan.box[2] * plan.box[3], plan.box[3], 1};
  const int kernel[] = {axis[0].kernel, axis[1].kernel, axis[2].kernel};
  for (int c = 0; c < parts[0] * parts[1] * parts[2]; ++c) {
    const int which[] = {c / (parts[1] * parts[2]), c / parts[2] % parts[1], c % parts[2]};
    Phase& phase = p.phase_of[transposed ? c : 0];
    if (transposed || c == 0) phase.first_load = static_cast<uint16_t>(loads);
    const AxisPhase* part[3];
    int outer = 1, inner = 1, count[2][3];  // boxes, and taps per box
    for (int a = 0; a < 3; ++a) {
      part[a] = &axis[a].phase[which[a]];
      phase.first[a] = part[a]->first;
      phase.count[a] = part[a]->count;
      outer *= count[0][a] = plan.halo[a] || (slides && a == 0) ? 1 : part[a]->taps;
      inner *= count[1][a] = plan.halo[a] ? part[a]->taps : 1;
    }
    phase.box_stages = static_cast<uint16_t>(divide_up(inner, stage));
    phase.weight_stages += outer * phase.box_stages;
    for (int o = 0; o < outer; ++o) {
      Load& load = p.load[loads++];
      load.first_tap = static_cast<uint16_t>(taps);
      load.taps = static_cast<uint16_t>(inner);
      int number[3] = {o / (count[0][1] * count[0][2]), o / count[0][2] % count[0][1], o % count[0][2]};
      for (int a = 0; a < 3; ++a) {
        const int row = plan.halo[a] || (slides && a == 0) ? part[a]->low : part[a]->start + number[a] * part[a]->step;
        load.offset[a] = static_cast<int16_t>(row * axis[a].in_step + part[a]->residue);
      }
      for (int i = 0; i < inner; ++i) {
        const int in_box[3] = {i / (count[1][1] * count[1][2]), i / count[1][2] % count[1][1], i % count[1][2]};
        int shift = 0, weight = 0;
        for (int a = 0; a < 3; ++a) {
          const int t = plan.halo[a] ? in_box[a] : number[a];
          if (plan.halo[a]) shift += (part[a]->start + t * part[a]->step - part[a]->low) * pitch[a];
          weight = weight * kernel[a] + (slides && a == 0 ? 0 : part[a]->tap_first + t * part[a]->tap_step);
        }
        p.tap[taps++] = {static_cast<int16_t>(shift), static_cast<uint16_t>(weight)};
      }
    }
    phase.loads = static_cast<uint16_t>(loads - phase.first_load);
    if (plan.omits_boxes()) phase.depth_loads = static_cast<uint16_t>(count[0][1] * count[0][2]);
  }
  const auto taps_of = [&](const Phase& phase) {
    return phase.loads > 0 ? phase.loads * p.load[phase.first_load].taps : 0;
  };
  std::stable_sort(p.phase_of, p.phase_of + p.phases,
                   [&](const Phase& a, const Phase& b) { return taps_of(a) > taps_of(b); });
  for (int i = 1; i < p.phases; ++i)
    p.phase_of[i].first_stage = p.phase_of[i - 1].first_stage + plan.chunks * p.phase_of[i - 1].weight_stages;
  if (slides) list_blocks(p, axis[0].phase[0], kernel[1] * kernel[2]);
}

Params make_params(const View& out, const View& in, const ConvEpilogue& epilogue, const ConvProblem& problem,
                   const FpropDgradPlan& plan) {
  Params p{};
  static_cast<FpropDgradShape&>(p) = plan;
  const bool transposed = problem.pass == ConvPass::dgrad;
  p.epilogue = EpilogueParams(epilogue);
  p.out = out.data;
  p.samples = static_cast<int>(problem.batch);
  p.product_chunks = Divisor(plan.chunks / plan.products);
  p.resident_chunks = plan.resident_chunks();
  p.taps = plan.axis[0].kernel * plan.axis[1].kernel * plan.axis[2].kernel;
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.units = static_cast<int>(plan.units);
  p.columns = Divisor(divide_up(p.out_channels, plan.cta.columns * plan.unit_columns));
  p.split = Divisor(plan.splits);
  p.phase_units = Divisor(plan.units / (plan.merged ? 1 : plan.phases));
  const int64_t count[] = {problem.batch, plan.axis[0].count, plan.axis[1].count, plan.axis[2].count};
  const int wide = 16 / static_cast<int>(item_size(problem.dtype));
  p.vectors = p.out_channels % wide == 0 && is_tma_tensor(out);
  p.channel_stride = out.size[1] == 1 ? 1 : out.stride[1];
  int all_tiles = 1;
  for (int a = 0; a < 4; ++a) {
    p.unit[a] = a == 1 ? plan.unit_depth() : plan.tile[a];
    p.tiles[a] = Divisor(static_cast<int>(divide_up(count[a], p.unit[a])));
    all_tiles *= p.tiles[a].value();
    p.out_stride[a] = out.stride[a == 0 ? 0 : a + 1];
    if (a == 0) continue;
    p.in_step[a - 1] = plan.axis[a - 1].in_step;
    p.out_step[a - 1] = plan.axis[a - 1].out_step;
    p.extent[a - 1] = Divisor(plan.box[4 - a]);
  }
  if (all_tiles % plan.cluster != 0) p.tiles[0] = Divisor(p.tiles[0].value() + 1);
  p.in_depth = static_cast<int>(problem.in_size[0]);
  p.box_depth = (plan.box[1] - 1) * p.in_step[0] + 1;
  p.box_rows = plan.box_rows();
  p.kept_taps = plan.kept ? p.taps / plan.cta.slide : 0;
  p.kept_stages = plan.kept ? plan.weight_stages / plan.unit_columns : 0;
  p.input_bytes = plan.input_bytes();
  list_taps(p, plan, transposed);
  p.input = describe_voxels(in, plan.chunk_channels, plan.box, p.in_step, "conv");
  return p;
}

/// Weights that TMA can read. The axis `inner`, 0 or 1, is contiguous. The taps are equally spaced.
struct WeightOperand {
  View view;
  int inner;
};

/// Returns true if the weights have the layout of WeightOperand, without gaps and with aligned rows.
bool is_dense_inner(const View& w, int inner) {
  return is_dense(w, {inner, 4, 3, 2, 1 - inner}) && w.size[inner] * item_size(w.dtype) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
}

/// Returns the weights without a copy if TMA can read them and wgmma can multiply them in this layout. `any`: wgmma
/// also accepts N-major weights. Otherwise returns `copy`, with channels padded to 16 bytes. With three products,
/// `copy` holds the taps of the high parts and then the taps of the low parts.
WeightOperand weight_operand(const View& w, bool transposed, bool three, bool any, std::optional<Workspace>& copy,
                             const Launch& launch) {
  const int k_axis = transposed ? 0 : 1;
  if (three) return {split_copy(w, {k_axis, 1 - k_axis, 4, 3, 2}, copy, launch), k_axis};
  int inner = any ? 1 : k_axis;
  if (any && !is_dense_inner(w, 1) && is_dense_inner(w, 0)) inner = 0;
  View operand = w;
  const int64_t elements = lay_out(operand, {inner, 4, 3, 2, 1 - inner});
  if (!is_dense_inner(w, inner)) {
    copy.emplace(launch, static_cast<size_t>(elements * item_size(w.dtype)));
    operand.data = copy->as<void>();
    kernel::copy(operand, w);
  }
  return {operand, inner};
}

/// Fills in the tensor map of the weights and the distances between groups. Returns true if the weights are N-major.
bool describe_weights(Params& p, const WeightOperand& weights, bool transposed, const FpropDgradPlan& plan) {
  const View& w = weights.view;
  const bool n_major = weights.inner == (transposed ? 1 : 0);
  p.k_group = transposed ? p.in_channels : 0;
  p.n_group = transposed ? 0 : p.out_channels;
  const int columns = std::min(plan.cta.columns, 64), k = plan.chunk_channels;
  const int64_t taps = w.size[2] * w.size[3] * w.size[4];
  p.weight = describe(SwizzledTensor{.data = w.data,
                                     .dtype = w.dtype,
                                     .size = {w.size[weights.inner], w.size[1 - weights.inner], taps},
                                     .stride = {1, w.stride[1 - weights.inner], w.stride[4]},
                                     .box = {n_major ? columns : k, n_major ? k : plan.cta.columns, 1},
                                     .step = {1, 1, 1},
                                     .row_bytes = n_major ? 2 * columns : plan.row_bytes,
                                     .rank = 3},
                      "conv");
  return n_major;
}

/// Makes the kernel store partial sums instead of results.
void store_partial_sums(Params& p, const View& out, float* partial) {
  p.partial = partial;
  p.epilogue.floor = -INFINITY;
  p.vectors = p.out_channels % 4 == 0;
  p.channel_stride = 1;
  int64_t stride = out.size[1];
  for (int a = 3; a >= 0; --a) {
    p.out_stride[a] = stride;
    stride *= out.size[a == 0 ? 0 : a + 1];
  }
  p.partial_stride = stride;
}

/// Adds the partial sums of all splits and stores the results.
void reduce(const View& out, const ConvEpilogue& epilogue, const Params& p, const ConvProblem& problem,
            cudaStream_t stream) {
  ReduceParams r{};
  const int64_t stride = p.partial_stride;
  r.partial = p.partial;
  r.partial_stride = stride;
  r.splits = p.split.value();
  r.channels = static_cast<int>(out.size[1]);
  r.voxels = stride / r.channels;
  r.epilogue = EpilogueParams(epilogue);
  r.out = out.data;
  for (int a = 0; a < 4; ++a) r.out_stride[a] = out.stride[a == 0 ? 0 : a + 1];
  r.channel_stride = out.size[1] == 1 ? 1 : out.stride[1];
  r.voxels_first = r.channel_stride != 1;
  for (int a = 0; a < 3; ++a) r.size[a] = Divisor(static_cast<int>(out.size[4 - a]));
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    using T = typename Arithmetic::Element;
    const bool vectors = r.channels % 4 == 0 && (r.voxels_first || is_tma_tensor(out));
    const auto kernel = vectors ? reduce_splits<T, 4> : reduce_splits<T, 1>;
    launch_kernel("conv: sum of splits", kernel, grid_size(stride / (vectors ? 4 : 1)), kBlock, 0, stream, r);
  });
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const FpropDgradPlan& plan, const Launch& launch) {
  const View &out = call.out, &in = call.in, &w = call.w;
  const bool transposed = call.pass == ConvPass::dgrad, three = plan.products > 1;
  if (!std::all_of(plan.axis, plan.axis + 3, [](const AxisPhases& axis) { return axis.complete; }))
    fill_bias(out, call.epilogue, launch);
  std::optional<TmaTensor> whole;
  std::optional<Workspace> parts, copy;
  const View input = three ? split_copy(in, {1, 4, 3, 2, 0}, parts, launch) : whole.emplace(in, launch).view();
  Params p = make_params(out, input, call.epilogue, problem, plan);
  const bool any = is_half(w.dtype) && may_be_n_major(plan.cta.columns);
  const bool n_major = describe_weights(p, weight_operand(w, transposed, three, any, copy, launch), transposed, plan);
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  if (plan.splits > 1) store_partial_sums(p, out, partial.as<float>());
  const int shared = 1024 + plan.input_stages * plan.input_bytes() + plan.all_weight_bytes();
  const int ctas = plan.cluster *
                   static_cast<int>(std::min<int64_t>(plan.units, std::max(problem.multiprocessors / plan.cluster, 1)));
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    launch_tile<Arithmetic>(p, plan.cta, n_major, ctas, shared, launch.stream);
  });
  if (plan.splits > 1) reduce(out, call.epilogue, p, problem, launch.stream);
}

}  // namespace voxgrad::cuda
