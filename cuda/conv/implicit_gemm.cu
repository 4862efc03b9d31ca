// Host side of the fprop and dgrad implicit GEMMs on packed weights: plan, packing, table of taps, launch.
#include "cuda/conv/dispatch.h"

#include "cuda/conv/common/implicit_gemm.cuh"
#include "cuda/conv/fprop_dgrad/plan.h"
#include "cuda/conv/packed/pack.h"
#include "cuda/conv/plan_cache.h"
#include "cuda/conv/small_channel/plan.h"
#include "cuda/conv/tensor_map.h"
#include "cuda/conv/wgrad/plan.h"
#include "cuda/kernels.h"
#include "ops/halves.h"

namespace voxgrad::cuda {
namespace {

/// An implicit GEMM with what it needs beside its operands. Inputs: by wgmma, those of the samples to come.
struct ImplicitGemm {
  ImplicitGemmParams p;
  PackWeights weights;
  PackInputs inputs;
};

/// Tells TMA how `planes` planes of packed inputs lie, and how large a halo is. Its axes: width, height,
/// depth, (plane, residue along the width).
CUtensorMap describe_planes(const ImplicitGemmParams& p, const PackInputs& inputs, void* packed, int64_t planes) {
  const int64_t depth = inputs.size[0], height = inputs.size[1], width = inputs.run;
  return describe(PackedTensor{.data = packed,
                               .size = {width, height, depth, planes * inputs.step[2].value},
                               .stride = {kVoxelBytes, width * kVoxelBytes, width * height * kVoxelBytes,
                                          width * height * depth * kVoxelBytes},
                               .box = {p.line_positions.value, p.extent[1].value, p.extent[0].value, 1},
                               .step = {1, p.axis[1].in_step, p.axis[0].in_step, 1}},
                  "conv");
}

/// Weights, packed, and the counter of tiles.
template <class Arithmetic>
class GemmWorkspace {
 public:
  GemmWorkspace(ImplicitGemm& g, const Launch& launch)
      : weights_(launch, packed_bytes<Arithmetic>(g.weights)), counter_(launch, sizeof(unsigned)) {
    pack_weights<Arithmetic>(g.weights, weights_.as<void>(), launch.stream);
    check_launch("conv: packing of weights");
    g.p.weights = weights_.as<uint4>();
    g.p.next_tile = g.inputs.counter = counter_.as<unsigned>();
  }

 private:
  Workspace weights_, counter_;
};

/// The next samples by wgmma, by way of `planes`, where their inputs are packed.
template <class Arithmetic>
void run_samples(ImplicitGemm& g, void* planes, int64_t samples, const Launch& launch) {
  using Element = typename Arithmetic::Element;
  g.p.batch = g.inputs.batch = samples;
  g.p.packed = describe_planes(g.p, g.inputs, planes, samples * g.p.groups * g.p.k_blocks * 2 * Arithmetic::kParts);
  pack_inputs<Arithmetic>(g.inputs, planes, launch.stream);
  check_launch("conv: packing of inputs");
  launch_fprop_dgrad_wgmma<Arithmetic>(g.p, g.weights.columns, launch.stream);
  check_launch("conv");
  g.inputs.in = static_cast<const Element*>(g.inputs.in) + samples * g.inputs.stride[0];
  g.p.out = static_cast<Element*>(g.p.out) + samples * g.p.out_stride[0];
}

/// By wgmma as many samples at a time as the plan has memory for.
template <class Arithmetic>
void run(ImplicitGemm& g, int64_t samples, const Launch& launch) {
  const GemmWorkspace<Arithmetic> memory(g, launch);
  if (!g.weights.wgmma) {
    launch_fprop_dgrad_mma_sync<Arithmetic>(g.p, g.weights.columns, launch.stream);
    return check_launch("conv");
  }
  const Workspace planes(launch, static_cast<size_t>(samples) * packed_bytes<Arithmetic>(g.inputs));
  for (int64_t left = g.p.batch; left > 0; left -= samples)
    run_samples<Arithmetic>(g, planes.as<void>(), std::min(left, samples), launch);
}

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "conv");
  return value;
}

/// Fills the table of taps: of each class, of each k-block of a stage.
void list_taps(ImplicitGemmParams& p, bool wgmma, int k_block_positions) {
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
    for (int i = 0; i < p.stage_k_blocks * taps; ++i) {
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
                                          offset[2] + i / taps * k_block_positions
                                    : ((offset[0] * lines + offset[1]) * p.line + residue * line + offset[2]) * 4;
    }
  }
  p.class_begin[p.classes] = count;
}

ImplicitGemmParams params_of(const View& out, const View& in, const ConvEpilogue& epilogue, const ConvProblem& problem,
                             const ImplicitGemmPlan& plan) {
  ImplicitGemmParams p{};
  p.in = in.data;
  p.bias = epilogue.bias ? epilogue.bias->data : nullptr;
  p.bias_stride = epilogue.bias ? epilogue.bias->stride[0] : 0;
  p.relu = epilogue.relu;
  p.out = out.data;
  std::copy_n(in.stride, 5, p.in_stride);
  std::copy_n(out.stride, 5, p.out_stride);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.groups = static_cast<int>(problem.groups);
  p.column_tiles = plan.column_tiles;
  p.k_blocks = plan.k_blocks;
  p.stage_k_blocks = plan.stage_k_blocks;
  p.class_stages = plan.k_blocks / plan.stage_k_blocks;
  p.transposed = problem.pass == ConvPass::dgrad;
  p.halo_voxels = plan.halo_voxels;
  p.line = plan.line;
  p.pitch = plan.pitch;
  p.rows = plan.rows;
  p.classes = plan.classes;
  p.tile_phases = plan.tile_phases;
  p.slide = plan.slide;
  p.range = plan.range;
  p.merged = plan.merged;
  p.input_stages = plan.input_stages;
  p.input_stage_count = Divisor(plan.input_stages);
  p.batch = problem.batch;
  p.multiprocessors = problem.multiprocessors;
  p.tile_voxels = 1;
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = plan.axis[a];
    p.tile[a] = Divisor(plan.tile[a]);
    p.extent[a] = Divisor(plan.extent[a]);
    p.tiles[a] = plan.tiles[a];
    p.tile_voxels *= plan.tile[a];
  }
  p.line_positions = Divisor(plan.extent[2] / plan.axis[2].fold);
  p.residue_positions = plan.residue_positions;
  list_taps(p, plan.wgmma, plan.rows.positions * (arithmetic_of(problem) == ConvArithmetic::tf32x3 ? 4 : 2));
  return p;
}

ImplicitGemm prepare(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                     const ConvProblem& problem, const ImplicitGemmPlan& plan) {
  const ImplicitGemmParams p = params_of(out, in, epilogue, problem, plan);
  const int in_axis = p.transposed ? 0 : 1;  // of the weight
  PackWeights weights{w.data,
                      w.size[0] / problem.groups * w.stride[0],
                      w.stride[in_axis],
                      w.stride[1 - in_axis],
                      {w.stride[2], w.stride[3], w.stride[4]},
                      p.groups,
                      p.in_channels,
                      p.out_channels,
                      plan.columns,
                      plan.column_tiles,
                      plan.k_blocks,
                      p.class_begin[p.classes] / plan.stage_k_blocks,
                      plan.slide,
                      plan.stage_k_blocks,
                      plan.tile_phases,
                      plan.wgmma,
                      {}};
  std::copy_n(plan.axis, 3, weights.axis);
  return {p, weights, plan.wgmma ? pack_inputs_of(problem, in) : PackInputs{}};
}

/// Whether tensor cores take both by wgmma, which reads the same packed inputs: of halves.
bool share_inputs(const ConvProblem& data, const ConvProblem& weight) {
  if (remembered<plan_fprop_dgrad>(data) || remembered<plan_wgrad>(weight) ||
      remembered<plan_small_channel_fprop_dgrad>(data) || remembered<plan_small_channel_wgrad>(weight))
    return false;
  const auto gemm = remembered<plan_implicit_gemm>(data);
  return gemm && gemm->wgmma && remembered<plan_packed_wgrad>(weight);
}

}  // namespace

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

bool implicit_gemm_fprop_dgrad(const View& out, const View& in, const View& w, const ConvEpilogue& epilogue,
                               const ConvGeometry& geometry, ConvPass pass, const Launch& launch) {
  ConvProblem problem = conv_problem(pass, in, out, w, geometry);
  describe_device(problem, launch);
  const auto plan = remembered<plan_implicit_gemm>(problem);
  if (!plan) return false;
  if (!std::all_of(plan->axis, plan->axis + 3, [](const AxisPhases& axis) { return axis.complete; }))
    fill_bias(out, epilogue, launch);
  ImplicitGemm gemm = prepare(out, in, w, epilogue, problem, *plan);
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() { run<Arithmetic>(gemm, plan->samples, launch); });
  return true;
}

bool packed_fprop_and_wgrad(const View& y, const View& dw, const View& x, const View& dy, const View& w,
                            const ConvGeometry& geometry, const Launch& launch) {
  if (!is_half(x.dtype) || w.numel() >= INT32_MAX) return false;  // that many weights are refused one by one
  ConvProblem data = conv_problem(ConvPass::fprop, x, y, w, geometry);
  ConvProblem weight = conv_problem(ConvPass::wgrad, x, dy, dw, geometry);
  describe_device(data, launch);
  describe_device(weight, launch);
  if (!share_inputs(data, weight)) return false;
  // Inputs fall into parts, of which each result has all: there is nothing to fill.
  ImplicitGemm gemm = prepare(y, x, w, {}, data, *remembered<plan_implicit_gemm>(data));
  const auto both = [&]<class Arithmetic>() {
    const GemmWorkspace<Arithmetic> memory(gemm, launch);
    packed_wgrad(dw, x, dy, geometry, launch,
                 [&](void* packed, int64_t samples) { run_samples<Arithmetic>(gemm, packed, samples, launch); });
  };
  data.dtype == DType::bf16 ? both.template operator()<Bf16>() : both.template operator()<F16>();
  return true;
}

}  // namespace voxgrad::cuda
