// Fprop and dgrad (the transposed convolution) on CUDA cores, for every geometry of f32 and f64: a SIMT implicit GEMM.
//
// A result is the sum of input voxels times weights, over the taps that reach the result. Along one axis
//
//   fprop: y[o] reads x[o * stride - padding + k * dilation]    for every tap k
//   dgrad: x[i] reads y[(i + padding - k * dilation) / stride]  if the index of y is an integer
//
// Dgrad has `stride` phases per axis: the results with equal i mod stride. The taps of a phase are k0, k0 + step, ...
// with step = stride / gcd(stride, dilation), and its results and inputs are evenly spaced. A Lattice describes a phase
// of one axis. Fprop has a single phase, so that one kernel computes both passes. A CTA tile consists of voxels of one
// phase (along each axis) by output channels, and K contains only the taps of this phase. The results of a phase
// without taps are the bias.
#include <numeric>

#include "core/detail/divide.h"
#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/simt/tile.cuh"

namespace voxgrad::cuda {
namespace {

/// A phase of one axis. Voxel j of the phase is result out_start + j * out_step. Tap t of the phase is tap
/// tap_start + t * tap_step of the kernel. With this tap, voxel j reads input in_start + j * in_step + t * in_tap_step.
struct Lattice {
  int count;  // voxels of the phase
  int taps;   // taps of the phase
  int out_start;
  int out_step;
  int tap_start;
  int tap_step;
  int in_start;
  int in_step;
  int in_tap_step;
};

/// One axis of the geometry.
struct ConvAxis {
  int64_t in_size;
  int64_t out_size;
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;
  int64_t phases;     // phases that have at least one voxel
  int64_t tap_step;   // taps of the kernel from one tap of a phase to the next
  int64_t max_count;  // voxels of the largest phase
};

__device__ Lattice lattice_of(const ConvAxis& axis, bool transposed, int64_t phase) {
  Lattice lattice;
  lattice.out_start = static_cast<int>(phase);
  if (!transposed) {
    lattice.out_step = 1;
    lattice.count = static_cast<int>(axis.out_size);
    lattice.tap_start = 0;
    lattice.tap_step = 1;
    lattice.taps = static_cast<int>(axis.kernel);
    lattice.in_start = static_cast<int>(-axis.padding);
    lattice.in_step = static_cast<int>(axis.stride);
    lattice.in_tap_step = static_cast<int>(axis.dilation);
    return lattice;
  }
  lattice.out_step = static_cast<int>(axis.stride);
  lattice.count = static_cast<int>(divide_up(axis.out_size - phase, axis.stride));
  int64_t k = 0;  // the first tap that reads an integer input position
  while (k < axis.tap_step && k < axis.kernel && (phase + axis.padding - k * axis.dilation) % axis.stride != 0) ++k;
  const bool reached = k < axis.tap_step && k < axis.kernel;
  lattice.tap_start = static_cast<int>(k);
  lattice.tap_step = static_cast<int>(axis.tap_step);
  lattice.taps = reached ? static_cast<int>((axis.kernel - 1 - k) / axis.tap_step + 1) : 0;
  lattice.in_start = static_cast<int>((phase + axis.padding - k * axis.dilation) / axis.stride);
  lattice.in_step = 1;
  lattice.in_tap_step = static_cast<int>(-axis.dilation * axis.tap_step / axis.stride);
  return lattice;
}

/// The parameters of simt_fprop_dgrad_kernel.
template <class T>
struct FpropDgradParams {
  const T* in;
  const T* weight;
  EpilogueParams epilogue;
  T* out;
  // All strides are in elements.
  int64_t in_stride[5];
  int64_t out_stride[5];
  int64_t weight_group;
  int64_t weight_in;
  int64_t weight_out;
  int64_t weight_tap[3];
  int64_t batch;
  int64_t groups;
  int in_channels;   // per group
  int out_channels;  // per group
  bool transposed;   // dgrad
  ConvAxis axis[3];
  int64_t voxel_tiles;    // tiles along the voxels of a phase
  int64_t channel_tiles;  // tiles along the output channels
  int64_t tiles;          // tiles in total
};

/// A CTA tile. Thread 0 computes it for all threads of the CTA.
struct CtaTile {
  Lattice lattice[3];
  int count[3];
  Voxel first;
  int64_t group;
  int channel;
};

/// Returns the CTA tile of an index. Channel tiles vary fastest, then phases, so that CTAs that read the same inputs
/// run at the same time.
template <class Tile, class T>
__device__ CtaTile cta_tile(const FpropDgradParams<T>& problem, int64_t index) {
  CtaTile tile;
  tile.channel = static_cast<int>(index % problem.channel_tiles) * Tile::kN;
  index /= problem.channel_tiles;
  for (int axis = 2; axis >= 0; --axis) {
    tile.lattice[axis] = lattice_of(problem.axis[axis], problem.transposed, index % problem.axis[axis].phases);
    tile.count[axis] = tile.lattice[axis].count;
    index /= problem.axis[axis].phases;
  }
  tile.first = voxel_at(index % problem.voxel_tiles * Tile::kM, tile.count);
  tile.group = index / problem.voxel_tiles;
  return tile;
}

/// Adds the bias, applies ReLU and stores the results of a CTA tile.
template <class Tile, class T>
__device__ void store_results(const FpropDgradParams<T>& problem, const CtaTile& tile,
                              const T (&total)[Tile::kThreadM][Tile::kThreadN]) {
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; ++i) {
    const Voxel voxel = advance(tile.first, Tile::m_of(i), tile.count);
    if (voxel.sample >= problem.batch) continue;
    int64_t offset = voxel.sample * problem.out_stride[0];
    for (int axis = 0; axis < 3; ++axis) {
      const Lattice& lattice = tile.lattice[axis];
      offset += (lattice.out_start + int64_t{voxel.index[axis]} * lattice.out_step) * problem.out_stride[axis + 2];
    }
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; ++j) {
      const int in_group = tile.channel + Tile::n_of(j);
      if (in_group >= problem.out_channels) continue;
      const int64_t channel = tile.group * problem.out_channels + in_group;
      const T result = total[i][j] + problem.epilogue.template bias_of<T, T>(channel), floor = problem.epilogue.floor;
      problem.out[offset + channel * problem.out_stride[1]] = result < floor ? floor : result;  // keeps NaN
    }
  }
}

/// Computes fprop or dgrad. Launch: CTAs of kTileThreads threads in a 1-D grid, each of which computes one tile after
/// another.
template <class Tile, bool kChannelsInnermost, class T = typename Tile::T>
__global__ void __launch_bounds__(kTileThreads, Tile::kBlocks)
    simt_fprop_dgrad_kernel(const __grid_constant__ FpropDgradParams<T> problem) {
  wait_for_previous_kernels();
  __shared__ TileMemory<Tile> memory;
  __shared__ CtaTile tile;
  for (int64_t index = blockIdx.x; index < problem.tiles; index += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) tile = cta_tile<Tile>(problem, index);
    __syncthreads();
    if (tile.first.sample >= problem.batch) continue;  // the phase has fewer voxels than max_count

    const Lattice(&lattice)[3] = tile.lattice;
    const int taps = lattice[0].taps * lattice[1].taps * lattice[2].taps;
    const auto make_site = [&](int m) {
      const Voxel voxel = advance(tile.first, m, tile.count);
      if (voxel.sample >= problem.batch) return Site{0, {-kPositionLimit, 0, 0}};
      Site site{voxel.sample * problem.in_stride[0], {}};
      for (int axis = 0; axis < 3; ++axis) {
        site.position[axis] = lattice[axis].in_start + voxel.index[axis] * lattice[axis].in_step;
        site.offset += site.position[axis] * problem.in_stride[axis + 2];
      }
      return site;
    };
    // k enumerates (channel, tap) in the order of the input in memory, which is usually also the order of the weights.
    const auto make_row = [&](int k) {
      const int channel = kChannelsInnermost ? k % problem.in_channels : k / taps;
      int tap = kChannelsInnermost ? k / problem.in_channels : k % taps;
      Row row{channel * problem.in_stride[1], channel * problem.weight_in, {}, 0};
      for (int axis = 2; axis >= 0; --axis) {
        const int t = tap % lattice[axis].taps;
        tap /= lattice[axis].taps;
        row.position[axis] = t * lattice[axis].in_tap_step;
        row.a += row.position[axis] * problem.in_stride[axis + 2];
        row.b += (lattice[axis].tap_start + int64_t{t} * lattice[axis].tap_step) * problem.weight_tap[axis];
      }
      return row;
    };

    const TileOperands<T> operands{
        problem.in + tile.group * problem.in_channels * problem.in_stride[1],
        problem.weight + tile.group * problem.weight_group + tile.channel * problem.weight_out,
        problem.weight_out,
        {static_cast<int>(problem.axis[0].in_size), static_cast<int>(problem.axis[1].in_size),
         static_cast<int>(problem.axis[2].in_size)},
        problem.out_channels - tile.channel,
        taps * problem.in_channels};
    T total[Tile::kThreadM][Tile::kThreadN] = {};
    tile_product<Tile, kChannelsInnermost>(total, memory, operands, make_site, make_row);
    store_results<Tile>(problem, tile, total);
  }
}

template <class Tile, class T = typename Tile::T>
void launch_tile(const char* op, FpropDgradParams<T> problem, bool innermost, cudaStream_t stream) {
  int64_t voxels = problem.batch, phases = 1;
  for (const ConvAxis& axis : problem.axis) {
    voxels *= axis.max_count;
    phases *= axis.phases;
  }
  problem.voxel_tiles = (voxels + Tile::kM - 1) / Tile::kM;
  problem.channel_tiles = (problem.out_channels + Tile::kN - 1) / Tile::kN;
  problem.tiles = problem.groups * phases * problem.voxel_tiles * problem.channel_tiles;
  const auto kernel = innermost ? simt_fprop_dgrad_kernel<Tile, true> : simt_fprop_dgrad_kernel<Tile, false>;
  launch_kernel(op, kernel, grid_size(problem.tiles, 1), kTileThreads, 0, stream, problem);
}

ConvAxis conv_axis(const View& in, const View& out, const View& w, const ConvGeometry& geometry, int axis,
                   bool transposed) {
  ConvAxis result{in.size[axis + 2],
                  out.size[axis + 2],
                  w.size[axis + 2],
                  geometry.stride[axis],
                  geometry.padding[axis],
                  geometry.dilation[axis],
                  1,
                  1,
                  out.size[axis + 2]};
  if (transposed) {
    result.phases = std::min(result.stride, result.out_size);
    result.tap_step = result.stride / std::gcd(result.stride, result.dilation);
    result.max_count = divide_up(result.out_size, result.stride);
  }
  return result;
}

template <class T>
void run(const ConvCall& call, cudaStream_t stream) {
  const View &out = call.out, &in = call.in, &w = call.w;
  const ConvGeometry& geometry = call.geometry;
  const bool transposed = call.pass == ConvPass::dgrad;
  const int in_axis = transposed ? 0 : 1;  // the axis of the weights that is summed
  const int64_t group_outputs = out.size[1] / geometry.groups;
  FpropDgradParams<T> problem{};
  problem.in = in.as<T>();
  problem.weight = w.as<T>();
  problem.epilogue = EpilogueParams(call.epilogue);
  problem.out = out.as<T>();
  std::copy_n(in.stride, 5, problem.in_stride);
  std::copy_n(out.stride, 5, problem.out_stride);
  std::copy_n(w.stride + 2, 3, problem.weight_tap);
  problem.weight_in = w.stride[in_axis];
  problem.weight_out = w.stride[1 - in_axis];
  problem.weight_group = w.size[0] / geometry.groups * w.stride[0];
  problem.batch = in.size[0];
  problem.groups = geometry.groups;
  problem.in_channels = static_cast<int>(in.size[1] / geometry.groups);
  problem.out_channels = static_cast<int>(group_outputs);
  problem.transposed = transposed;
  for (int axis = 0; axis < 3; ++axis) problem.axis[axis] = conv_axis(in, out, w, geometry, axis, transposed);

  const bool innermost = channels_innermost(in);
  if constexpr (sizeof(T) == 4) {  // fewer output channels select a narrower tile
    if (group_outputs > 32) return launch_tile<TileShape<T, 4, 8, 8>>(call.op, problem, innermost, stream);  // 128 x 64
    if (group_outputs <= 8) return launch_tile<TileShape<T, 1, 8, 1>>(call.op, problem, innermost, stream);  // 256 x 8
  }
  launch_tile<TileShape<T, 4, 4, 8>>(call.op, problem, innermost, stream);  // 128 x 32
}

}  // namespace

void simt_fprop_dgrad(const ConvCall& call, const Launch& launch) {
  dispatch(WideFloats(), call.out.dtype, call.op, "CUDA", [&]<class T>() { run<T>(call, launch.stream); });
}

}  // namespace voxgrad::cuda
