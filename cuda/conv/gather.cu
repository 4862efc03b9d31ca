// Forward and transposed convolution on tensor cores: plan, packed weights, launch.
#include "cuda/conv/gather.h"

#include "cuda/conv/gather_mma.cuh"
#include "cuda/conv/gather_wgmma.cuh"
#include "cuda/conv/pack.h"
#include "cuda/conv/plan.h"
#include "cuda/kernels.h"

namespace voxgrad::cuda {
namespace {

template <class Arithmetic>
void run(GatherMma& p, const PackWeights& pack, const Launch& launch) {
  const Workspace packed(launch, packed_bytes<Arithmetic>(pack));
  pack_weights<Arithmetic>(pack, packed.as<void>(), launch.stream);
  check_launch("conv: packing of weights");
  p.weights = packed.as<uint4>();
  (pack.wgmma ? launch_gather_wgmma<Arithmetic> : launch_gather_mma<Arithmetic>)(p, pack.columns, launch.stream);
  check_launch("conv");
}

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "conv");
  return value;
}

/// Fills the table of taps, class after class.
void list_taps(GatherMma& p) {
  int count = 0;
  for (int c = 0; c < p.classes; ++c) {
    p.class_begin[c] = count;
    const AxisPart* part[3];
    int number = c, taps = 1;
    for (int a = 2; a >= 0; --a) {
      part[a] = &p.axis[a].part[number % p.axis[a].parts];
      number /= p.axis[a].parts;
      taps *= part[a]->taps;
    }
    for (int i = 0; i < taps; ++i) {
      int index = i, offset[3];
      for (int a = 2; a >= 0; --a) {
        const int fold = p.axis[a].fold;
        const int row = part[a]->start + index % part[a]->taps * part[a]->step - part[a]->low * fold;  // not negative
        index /= part[a]->taps;
        offset[a] = row % fold * (p.extent[a].value / fold) + row / fold;
      }
      p.tap_offset[count++] = ((offset[0] * p.extent[1].value + offset[1]) * p.line + offset[2]) * 4;
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
  const auto plan = plan_gather(problem);
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
  p.transposed = transposed;
  p.halo_voxels = plan->halo_voxels;
  p.line = plan->line;
  p.pitch = plan->pitch;
  p.classes = plan->classes;
  p.slots = plan->slots;
  p.merged = plan->merged;
  p.buffers = plan->buffers;
  p.batch = problem.batch;
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
  list_taps(p);
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
                   p.class_begin[p.classes],
                   plan->slots,
                   plan->wgmma,
                   {}};
  std::copy_n(plan->axis, 3, pack.axis);
  switch (arithmetic_of(problem)) {
    case ConvArithmetic::tf32:
      run<Tf32>(p, pack, launch);
      break;
    case ConvArithmetic::tf32x3:
      run<Tf32x3>(p, pack, launch);
      break;
    case ConvArithmetic::bf16:
      run<Bf16>(p, pack, launch);
      break;
    case ConvArithmetic::f16:
      run<F16>(p, pack, launch);
      break;
  }
  return true;
}

}  // namespace voxgrad::cuda
