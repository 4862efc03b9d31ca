// Wgrad on CUDA cores, for every geometry of f32 and f64: a SIMT implicit GEMM with split-K.
//
//   dw[co][ci][k] = sum over samples and voxels o of y[co][o] * x[ci][o * stride - padding + k * dilation]
//
// The voxels are divided into ranges, whose length depends only on the shape. A CTA computes the sums of one range for
// a tile of (channel, tap) by output channels. Sums of 256 products in float are added in double. A second kernel adds
// the partial sums of all ranges in a fixed order, so that results are bitwise reproducible on every GPU.
#include "core/detail/divide.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/simt/tile.cuh"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

/// The parameters of simt_wgrad_kernel.
template <class T>
struct WgradParams {
  const T* x;
  const T* y;
  T* partial;  // (ranges, groups, out_channels, columns), columns as (channel, tap) or (tap, channel)
  int64_t x_stride[5];
  int64_t y_stride[5];
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int padding[3];
  int dilation[3];
  int in_channels;   // per group
  int out_channels;  // per group
  int columns;       // (channel, tap) pairs
  int64_t groups;
  int64_t voxels;         // in all samples
  int range;              // voxels of a CTA
  int64_t column_tiles;   // tiles along the (channel, tap) pairs
  int64_t channel_tiles;  // tiles along the output channels
  int64_t tiles;          // tiles in total
};

/// Computes partial sums of the weight gradient. Launch: CTAs of kTileThreads threads in a 1-D grid, each of which
/// computes one tile after another.
template <class Tile, bool kChannelsInnermost, class T = typename Tile::T>
__global__ void __launch_bounds__(kTileThreads, Tile::kBlocks)
    simt_wgrad_kernel(const __grid_constant__ WgradParams<T> problem) {
  wait_for_previous_kernels();
  __shared__ TileMemory<Tile> memory;
  __shared__ Voxel first;
  for (int64_t index = blockIdx.x; index < problem.tiles; index += gridDim.x) {
    const int column0 = static_cast<int>(index % problem.column_tiles) * Tile::kM;
    const int64_t outer = index / problem.column_tiles, rest = outer / problem.channel_tiles;
    const int channel0 = static_cast<int>(outer % problem.channel_tiles) * Tile::kN;
    const int64_t group = rest % problem.groups, begin = rest / problem.groups * problem.range;
    __syncthreads();
    if (threadIdx.x == 0) first = voxel_at(begin, problem.y_size);
    __syncthreads();

    const int taps = problem.kernel[0] * problem.kernel[1] * problem.kernel[2];
    const auto make_site = [&](int m) {
      const int column = column0 + m;
      if (column >= problem.columns) return Site{0, {-kPositionLimit, 0, 0}};
      const int channel = kChannelsInnermost ? column % problem.in_channels : column / taps;
      int tap = kChannelsInnermost ? column / problem.in_channels : column % taps;
      Site site{channel * problem.x_stride[1], {}};
      for (int axis = 2; axis >= 0; --axis) {
        site.position[axis] = tap % problem.kernel[axis] * problem.dilation[axis];
        site.offset += site.position[axis] * problem.x_stride[axis + 2];
        tap /= problem.kernel[axis];
      }
      return site;
    };
    const auto make_row = [&](int k) {
      const Voxel voxel = advance(first, k, problem.y_size);
      Row row{voxel.sample * problem.x_stride[0], voxel.sample * problem.y_stride[0], {}, 0};
      for (int axis = 0; axis < 3; ++axis) {
        row.position[axis] = voxel.index[axis] * problem.stride[axis] - problem.padding[axis];
        row.a += row.position[axis] * problem.x_stride[axis + 2];
        row.b += voxel.index[axis] * problem.y_stride[axis + 2];
      }
      return row;
    };

    const TileOperands<T> operands{problem.x + group * problem.in_channels * problem.x_stride[1],
                                   problem.y + (group * problem.out_channels + channel0) * problem.y_stride[1],
                                   problem.y_stride[1],
                                   {problem.x_size[0], problem.x_size[1], problem.x_size[2]},
                                   problem.out_channels - channel0,
                                   static_cast<int>(min(static_cast<int64_t>(problem.range), problem.voxels - begin))};
    double total[Tile::kThreadM][Tile::kThreadN] = {};
    tile_product<Tile, !kChannelsInnermost>(total, memory, operands, make_site, make_row);

    T* partial = problem.partial + rest * problem.out_channels * problem.columns;  // rest: (range, group)
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; ++j) {
        const int column = column0 + Tile::m_of(i), channel = channel0 + Tile::n_of(j);
        if (column < problem.columns && channel < problem.out_channels)
          partial[int64_t{channel} * problem.columns + column] = static_cast<T>(total[i][j]);
      }
  }
}

/// Returns the number of voxels of a range. There are enough ranges for about 1000 CTAs, but a range has at least 2048
/// voxels. This bounds the partial sums to about 16 MB or the size of the weights, whichever is more.
int range_length(int64_t voxels, int64_t tiles) {
  constexpr int64_t kBlocks = 1024, kShortest = 2048, kLongest = 1 << 24;
  const int64_t ranges = std::max<int64_t>(kBlocks / tiles, 1);
  return static_cast<int>(std::clamp(divide_up(voxels, ranges), kShortest, kLongest));
}

/// Adds the partial sums of all ranges and stores them in w.
template <class T>
void sum_ranges(const View& w, const WgradParams<T>& problem, int64_t ranges, bool innermost) {
  const int64_t groups = problem.groups, channels = problem.out_channels, columns = problem.columns;
  const int64_t in_channels = problem.in_channels, tap = innermost ? in_channels : 1;
  const View in{.data = problem.partial,
                .dtype = w.dtype,
                .device = w.device,
                .rank = 7,
                .size = {ranges, groups, channels, in_channels, w.size[2], w.size[3], w.size[4]},
                .stride = {groups * channels * columns, channels * columns, columns,
                           innermost ? 1 : columns / in_channels, w.size[3] * w.size[4] * tap, w.size[4] * tap, tap}};
  const View out{
      .data = w.data,
      .dtype = w.dtype,
      .device = w.device,
      .rank = 7,
      .size = {1, groups, channels, in_channels, w.size[2], w.size[3], w.size[4]},
      .stride = {0, channels * w.stride[0], w.stride[0], w.stride[1], w.stride[2], w.stride[3], w.stride[4]}};
  kernel::reduce(ReduceOp::sum, out, in);
}

template <class Tile, class T = typename Tile::T>
void launch_tile(WgradParams<T> problem, const View& w, bool innermost, const Launch& launch) {
  problem.column_tiles = (problem.columns + Tile::kM - 1) / Tile::kM;
  problem.channel_tiles = (problem.out_channels + Tile::kN - 1) / Tile::kN;
  const int64_t tiles = problem.column_tiles * problem.channel_tiles * problem.groups;
  problem.range = range_length(problem.voxels, tiles);
  const int64_t ranges = divide_up(problem.voxels, problem.range);
  problem.tiles = tiles * ranges;

  const Workspace partial(launch, static_cast<size_t>(ranges * w.numel()) * sizeof(T));
  problem.partial = partial.as<T>();
  if (problem.tiles > 0) {
    const auto kernel = innermost ? simt_wgrad_kernel<Tile, true> : simt_wgrad_kernel<Tile, false>;
    launch_kernel("conv weight gradient", kernel, grid_size(problem.tiles, 1), kTileThreads, 0, launch.stream, problem);
  }
  sum_ranges(w, problem, ranges, innermost);
}

template <class T>
void run(const View& w, const View& x, const View& y, const ConvGeometry& geometry, const Launch& launch) {
  WgradParams<T> problem{};
  problem.x = x.as<T>();
  problem.y = y.as<T>();
  std::copy_n(x.stride, 5, problem.x_stride);
  std::copy_n(y.stride, 5, problem.y_stride);
  for (int axis = 0; axis < 3; ++axis) {
    problem.x_size[axis] = static_cast<int>(x.size[axis + 2]);
    problem.y_size[axis] = static_cast<int>(y.size[axis + 2]);
    problem.kernel[axis] = static_cast<int>(w.size[axis + 2]);
    problem.stride[axis] = static_cast<int>(geometry.stride[axis]);
    problem.padding[axis] = static_cast<int>(geometry.padding[axis]);
    problem.dilation[axis] = static_cast<int>(geometry.dilation[axis]);
  }
  problem.in_channels = static_cast<int>(w.size[1]);
  problem.out_channels = static_cast<int>(w.size[0] / geometry.groups);
  problem.columns = static_cast<int>(w.size[1] * w.size[2] * w.size[3] * w.size[4]);
  problem.groups = geometry.groups;
  problem.voxels = y.size[0] * y.size[2] * y.size[3] * y.size[4];

  const bool innermost = channels_innermost(x);
  if constexpr (sizeof(T) == 4)
    if (problem.out_channels <= 8) return launch_tile<TileShape<T, 1, 4, 2>>(problem, w, innermost, launch);  // 128 x 8
  launch_tile<TileShape<T, 4, 4, 8>>(problem, w, innermost, launch);  // 128 x 32
}

}  // namespace

void simt_wgrad(const ConvCall& call, const Launch& launch) {
  dispatch(WideFloats(), call.w.dtype, call.op, "CUDA",
           [&]<class T>() { run<T>(call.w, call.in, call.out, call.geometry, launch); });
}

}  // namespace voxgrad::cuda
