// Forward and transposed convolution on tensor cores: plan, packed weights, launch.
#include "cuda/conv/gather.h"

#include "cuda/conv/arithmetic.cuh"
#include "cuda/conv/gather_mma.cuh"
#include "cuda/conv/gather_wgmma.cuh"
#include "cuda/conv/pack.h"
#include "cuda/conv/plan_cache.h"
#include "cuda/conv/tensor_map.h"
#include "cuda/kernels.h"

namespace voxgrad::cuda {
namespace {

/// Tells the copy engine how `planes` planes of packed inputs lie, and how large a halo is. Its axes: width, height,
/// depth, (plane, residues).
CUtensorMap describe_planes(const GatherMma& p, const PackInputs& inputs, void* packed, int64_t planes) {
  const int64_t residues = int64_t{inputs.splits[0].value} * inputs.splits[1].value * inputs.splits[2].value;
  const int64_t depth = inputs.split_size[0], height = inputs.split_size[1], width = inputs.split_size[2];
  return describe(
      {.data = packed,
       .size = {width, height, depth, planes * residues},
       .stride = {kVoxelBytes, width * kVoxelBytes, width * height * kVoxelBytes, width * height * depth * kVoxelBytes},
       .box = {p.line_positions.value, p.extent[1].value, p.extent[0].value, 1},
       .step = {1, 1, 1, 1}},
      "conv");
}

/// By wgmma inputs are packed, too, as many samples at a time as the plan has memory for.
template <class Arithmetic>
void run(GatherMma& p, const PackWeights& weights, PackInputs& inputs, int64_t samples, const Launch& launch) {
  const Workspace packed(launch, packed_bytes<Arithmetic>(weights));
  pack_weights<Arithmetic>(weights, packed.as<void>(), launch.stream);
  check_launch("conv: packing of weights");
  p.weights = packed.as<uint4>();
  if (!weights.wgmma) {
    launch_gather_mma<Arithmetic>(p, weights.columns, launch.stream);
    return check_launch("conv");
  }
  using Element = typename Arithmetic::Element;
  const Workspace planes(launch, static_cast<size_t>(samples) * packed_bytes<Arithmetic>(inputs));
  const Workspace counter(launch, sizeof(unsigned));
  p.packed = describe_planes(p, inputs, planes.as<void>(), samples * p.groups * p.chunks * 2 * Arithmetic::kParts);
  p.next_box = inputs.counter = counter.as<unsigned>();
  for (int64_t left = p.batch; left > 0; left -= samples) {
    p.batch = inputs.batch = std::min(left, samples);
    pack_inputs<Arithmetic>(inputs, planes.as<void>(), launch.stream);
    check_launch("conv: packing of inputs");
    launch_gather_wgmma<Arithmetic>(p, weights.columns, launch.stream);
    check_launch("conv");
    inputs.in = static_cast<const Element*>(inputs.in) + p.batch * inputs.stride[0];
    p.out = static_cast<Element*>(p.out) + p.batch * p.out_stride[0];
  }
}

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "conv");
  return value;
}

/// Fills the table of taps: of each class, of each chunk of a step.
void list_taps(GatherMma& p, bool wgmma, int chunk_positions) {
  int count = 0;
  for (int c = 0; c < p.classes; ++c) {
    p.class_begin[c] = count;
    const AxisPart* part[3];
    int number = c, taps = 1;
    for (int a = 2; a >= 0; --a) {
      p.class_part[c][a] = static_cast<uint8_t>(number % p.axis[a].parts);
      part[a] = &p.axis[a].part[p.class_part[c][a]];
      number /= p.axis[a].parts;
      taps *= part[a]->taps;
    }
    for (int i = 0; i < p.depth * taps; ++i) {
      int index = i % taps, offset[3], residue = 0;
      for (int a = 2; a >= 0; --a) {
        const int fold = p.axis[a].fold;
        const int row = part[a]->start + index % part[a]->taps * part[a]->step - part[a]->low * fold;  // not negative
        index /= part[a]->taps;
        if (a == 2) residue = row % fold;  // the other axes are not folded
        offset[a] = row / fold;
      }
      const int lines = p.extent[1].value, line = p.line_positions.value;
      p.tap_offset[count++] = wgmma ? residue * p.residue_positions + (offset[0] * lines + offset[1]) * line +
                                          offset[2] + i / taps * chunk_positions
                                    : ((offset[0] * lines + offset[1]) * p.line + residue * line + offset[2]) * 4;
    }
  }
  p.class_begin[p.classes] = count;
}

/// out[n][c][...] = bias[c], behind the ReLU if there is one: what no tap reaches.
void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch) {
  if (!epilogue.bias) return kernel::fill(out, 0);
  View values = *epilogue.bias;
  const Workspace rectified(launch, epilogue.relu ? sizeof(float) * static_cast<size_t>(values.size[0]) : 0);
  if (epilogue.relu) {  // in float: halves have no element-wise kernels
    values.data = rectified.as<void>();
    values.dtype = DType::f32;
    values.stride[0] = 1;
    kernel::copy(values, *epilogue.bias);
    kernel::unary(UnaryOp::relu, values, values, 0, 0);
  }
  View broadcast = out;
  broadcast.data = values.data;
  broadcast.dtype = values.dtype;
  for (int a = 0; a < out.rank; ++a) broadcast.stride[a] = a == 1 ? values.stride[0] : 0;
  kernel::copy(out, broadcast);
}

}  // namespace

void describe_device(ConvProblem& problem, const Launch& launch) {
  problem.shared_limit = attribute(launch.device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  problem.multiprocessors = attribute(launch.device, cudaDevAttrMultiProcessorCount);
  problem.wgmma = has_wgmma(launch.device);
}

bool has_wgmma(int device) {
#ifdef VOXGRAD_SM90A
  return attribute(device, cudaDevAttrComputeCapabilityMajor) == 9;
#else
  static_cast<void>(device);
  return false;
#endif
}

bool gather_on_tensor_cores(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                            const ConvGeometry& geometry, bool transposed, const Launch& launch) {
  const int in_axis = transposed ? 0 : 1;  // of the weight
  ConvProblem problem =
      conv_problem(transposed ? ConvDirection::transposed : ConvDirection::forward, in, out, w, geometry);
  describe_device(problem, launch);
  const auto plan = remembered<plan_gather>(problem);
  if (!plan) return false;

  GatherMma p{};
  p.in = in.data;
  p.bias = epilogue.bias ? epilogue.bias->data : nullptr;
  p.bias_stride = epilogue.bias ? epilogue.bias->stride[0] : 0;
  p.relu = epilogue.relu;
  p.out = out.data;
  std::copy_n(in.stride, 5, p.in_stride);
  std::copy_n(out.stride, 5, p.out_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.groups = static_cast<int>(geometry.groups);
  p.column_tiles = plan->column_tiles;
  p.chunks = plan->chunks;
  p.depth = plan->depth;
  p.class_steps = plan->chunks / plan->depth;
  p.transposed = transposed;
  p.halo_voxels = plan->halo_voxels;
  p.line = plan->line;
  p.pitch = plan->pitch;
  p.rows = plan->rows;
  p.classes = plan->classes;
  p.slots = plan->slots;
  p.slide = plan->slide;
  p.range = plan->range;
  p.merged = plan->merged;
  p.buffers = plan->buffers;
  p.buffer_count = Divisor(plan->buffers);
  p.batch = problem.batch;
  p.multiprocessors = problem.multiprocessors;
  bool complete = true;
  p.box_voxels = 1;
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = plan->axis[a];
    p.box[a] = Divisor(plan->box[a]);
    p.extent[a] = Divisor(plan->extent[a]);
    p.tiles[a] = plan->tiles[a];
    p.box_voxels *= plan->box[a];
    complete &= plan->axis[a].complete;
  }
  p.line_positions = Divisor(plan->extent[2] / plan->axis[2].fold);
  p.residue_positions = plan->residue_positions;
  list_taps(p, plan->wgmma, plan->rows.positions * (arithmetic_of(problem) == ConvArithmetic::tf32x3 ? 4 : 2));
  if (!complete) fill_bias(out, epilogue, launch);

  PackWeights pack{w.data,
                   w.size[0] / geometry.groups * w.stride[0],
                   w.stride[in_axis],
                   w.stride[1 - in_axis],
                   {w.stride[2], w.stride[3], w.stride[4]},
                   p.groups,
                   p.in_channels,
                   p.out_channels,
                   plan->columns,
                   plan->column_tiles,
                   plan->chunks,
                   p.class_begin[p.classes] / plan->depth,
                   plan->slide,
                   plan->depth,
                   plan->slots,
                   plan->wgmma,
                   {}};
  std::copy_n(plan->axis, 3, pack.axis);
  PackInputs inputs{};
  inputs.in = in.data;
  inputs.groups = p.groups;
  inputs.channels = p.in_channels;
  inputs.chunks = p.chunks;
  std::copy_n(in.stride, 5, inputs.stride);
  if (plan->wgmma) {
    for (int a = 0; a < 3; ++a) {
      inputs.size[a] = static_cast<int>(in.size[a + 2]);
      const AxisParts& axis = plan->axis[a];
      const int splits = splits_of(axis);
      inputs.splits[a] = Divisor(splits);
      inputs.split_size[a] = (inputs.size[a] + splits - 1) / splits;
      for (int i = 0; i < axis.parts; ++i) inputs.is_read[a] |= axis.fold > 1 ? ~0u : 1u << axis.part[i].residue;
    }
    inputs.lines = Divisor(inputs.split_size[1] * inputs.splits[1].value);
    inputs.line = Divisor(inputs.split_size[2] * inputs.splits[2].value);
  }
  with_arithmetic(arithmetic_of(problem),
                  [&]<class Arithmetic>() { run<Arithmetic>(p, pack, inputs, plan->samples, launch); });
  return true;
}

}  // namespace voxgrad::cuda
