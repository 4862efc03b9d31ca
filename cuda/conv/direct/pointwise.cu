// 1x1x1 convolutions between a tensor with many channels (wide) and a tensor with few channels (narrow): SIMT GEMMs for
// fprop, dgrad and wgrad (with split-K).
//
// Both tensors are lists of voxels, and a warp computes one tile of voxels after another. Four lanes share a voxel of
// the wide tensor, and each lane loads vectors of its channels. A tile of the narrow tensor is contiguous and is copied
// through shared memory. All products and sums are in float32.
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kLanes = kPointwiseLanes, kRows = 32 / kLanes;  // kRows: voxels that a warp loads at a time
constexpr int kVoxels = kPointwiseVoxels, kDepth = kVoxels / kRows;
constexpr int kWgradThreads = 32 * kPointwiseWgradWarps;
static_assert(kDepth == kLanes, "reduce_scatter() leaves one voxel to each lane");

/// The parameters of pointwise_to_narrow() and pointwise_to_wide().
struct PointwiseParams {
  const void* in;
  const void* weight;
  EpilogueParams epilogue;
  void* out;
  int64_t weight_narrow;  // stride of the weights along the narrow channels, in elements
  int64_t weight_wide;    // stride of the weights along the wide channels, in elements
  int64_t voxels;         // number of voxels
  int wide;               // number of wide channels
  int pitch;              // `wide`, rounded up to the vectors of 4 lanes
  int out_channels;
  bool aligned;  // the narrow tensor begins at a multiple of 16 bytes
};

/// The position of a thread: its warp and lane, the voxel of the lane (row), and its share of the channels (part).
struct Lane {
  int warp = static_cast<int>(threadIdx.x) / 32;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int row = lane / kLanes;
  int part = lane % kLanes;
};

/// Stores 16 bytes with one instruction. For a plain assignment, nvcc would emit four.
template <class T>
__device__ void store_words(T* to, const Vector<T, kVectorWidth<T>>& vector) {
  __stwb(reinterpret_cast<uint4*>(to), std::bit_cast<uint4>(vector));
}

/// Copies the weights to shared memory, as [wide / 4][narrow][4]. The bias is an additional narrow channel. Elements
/// after the last channel are zero.
template <class T, int kNarrow>
__device__ void load_weights(const PointwiseParams& p, float* to) {
  constexpr int kWeightRows = pointwise_weight_rows(kNarrow);
  const T* const weight = static_cast<const T*>(p.weight);
  for (int i = static_cast<int>(threadIdx.x); i < kWeightRows * p.pitch; i += 32 * kPointwiseWarps) {
    const int k = i / 4 % kWeightRows, c = i / (4 * kWeightRows) * 4 + i % 4;
    float value = 0;
    if (k < kNarrow && c < p.wide) value = convert<float>(weight[k * p.weight_narrow + c * p.weight_wide]);
    if (k == kNarrow && c < p.out_channels) value = p.epilogue.bias_of<T>(c);
    to[i] = value;
  }
  __syncthreads();
}

/// Copies a tile of the narrow tensor to shared memory, as [narrow / 4][voxel][4]. Voxels from `voxels` on are zero.
template <class T, int kNarrow, int kTile>
__device__ void stage_narrow(const T* from, int voxels, float* to) {
  int lane;  // read again for each tile; otherwise, nvcc would keep all quotients below in registers
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  T values[kNarrow * kTile / 32];
#pragma unroll
  for (int i = 0; i < kNarrow * kTile / 32; ++i)
    values[i] = lane + i * 32 < voxels * kNarrow ? from[lane + i * 32] : T(0.0f);
  __syncwarp();  // all lanes have read the previous tile
#pragma unroll
  for (int i = 0; i < kNarrow * kTile / 32; ++i) {
    const int voxel = (lane + i * 32) / kNarrow, k = (lane + i * 32) % kNarrow;
    to[k / 4 * 4 * kTile + voxel * 4 + k % 4] = convert<float>(values[i]);
  }
  __syncwarp();
}

/// Adds the sums that 4 lanes hold for each of 4 voxels. Lane i receives the totals of voxel i.
template <int kNarrow>
__device__ void reduce_scatter(float (&sum)[kDepth][kNarrow], int part) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const bool upper = part & step;
#pragma unroll
    for (int v = 0; v < step; ++v)
#pragma unroll
      for (int k = 0; k < kNarrow; ++k) {
        const float kept = upper ? sum[v + step][k] : sum[v][k], sent = upper ? sum[v][k] : sum[v + step][k];
        sum[v][k] = kept + __shfl_xor_sync(~0u, sent, step);
      }
  }
}

/// Loads vectors of the channels from c on, of the voxels `row`, row + kRows, and so on. Voxels from `count` on are
/// zero.
template <class T>
__device__ void load_wide(PackedVector<T, kVectorWidth<T>> (&to)[kDepth], const PointwiseParams& p, const T* in,
                          int row, int count, int c) {
#pragma unroll
  for (int v = 0; v < kDepth; ++v, row += kRows) to[v] = {in + row * p.wide + c, row < count && c < p.wide, T(0.0f)};
}

/// Computes narrow results from wide inputs. Launch: CTAs of kPointwiseWarps warps in a 1-D grid. Dynamic shared
/// memory: the weights.
template <class T, int kNarrow>
__global__ void __launch_bounds__(32 * kPointwiseWarps, pointwise_blocks(kNarrow))
    pointwise_to_narrow(const __grid_constant__ PointwiseParams p) {
  constexpr int kWidth = kVectorWidth<T>, kWeightRows = pointwise_weight_rows(kNarrow);
  constexpr bool kPrefetch = sizeof(T) == 4 && kNarrow <= 8;  // otherwise, there are too few registers
  extern __shared__ __align__(16) float weights[];
  __shared__ __align__(16) T results[kPointwiseWarps][kVoxels * kNarrow];
  load_weights<T, kNarrow>(p, weights);
  const Lane at;
  const int voxel = at.part * kRows + at.row;  // the voxel of the tile whose totals this lane receives
  T* const staged = results[at.warp];
  const int64_t step = int64_t{gridDim.x} * kPointwiseWarps * kVoxels;
  for (int64_t first = (int64_t{blockIdx.x} * kPointwiseWarps + at.warp) * kVoxels; first < p.voxels; first += step) {
    const int count = static_cast<int>(min(p.voxels - first, int64_t{kVoxels}));
    const T* in = static_cast<const T*>(p.in) + first * p.wide;
    float sum[kDepth][kNarrow] = {};
    PackedVector<T, kWidth> loaded[kDepth], next[kDepth];
    const auto load = [&](int c) { load_wide(next, p, in, at.row, count, c); };
    if (kPrefetch) load(at.part * kWidth);
    for (int c = at.part * kWidth; c < p.pitch; c += kLanes * kWidth) {
      if (!kPrefetch) load(c);
#pragma unroll
      for (int v = 0; v < kDepth; ++v) loaded[v] = next[v];
      if (kPrefetch) load(c + kLanes * kWidth);
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
#pragma unroll
        for (int k = 0; k < kNarrow; ++k) {
          const auto weight = load_vector<float, 4>(weights + (c + j) * kWeightRows + k * 4);
#pragma unroll
          for (int v = 0; v < kDepth; ++v) {
            const auto x = loaded[v].get();
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[v][k] = fmaf(convert<float>(x.v[j + i]), weight.v[i], sum[v][k]);
          }
        }
      }
    }
    reduce_scatter(sum, at.part);
    __syncwarp();  // all lanes have stored the previous tile
#pragma unroll
    for (int k = 0; k < kNarrow; ++k) {
      const float result = sum[0][k] + weights[(k / 4 * kWeightRows + kNarrow) * 4 + k % 4];
      staged[voxel * kNarrow + k] = convert<T>(max_or_nan(result, p.epilogue.floor));
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out) + first * kNarrow;
    if (p.aligned && count == kVoxels) {
#pragma unroll
      for (int i = at.lane * kWidth; i < kVoxels * kNarrow; i += 32 * kWidth)
        store_words(out + i, load_vector<T, kWidth>(staged + i));
    } else {
      for (int i = at.lane; i < count * kNarrow; i += 32) out[i] = staged[i];
    }
  }
}

/// Computes wide results from narrow inputs. The launch is that of pointwise_to_narrow().
template <class T, int kNarrow>
__global__ void __launch_bounds__(32 * kPointwiseWarps, pointwise_blocks(kNarrow))
    pointwise_to_wide(const __grid_constant__ PointwiseParams p) {
  constexpr int kWidth = kVectorWidth<T>, kWeightRows = pointwise_weight_rows(kNarrow);
  extern __shared__ __align__(16) float weights[];
  __shared__ __align__(16) float inputs[kPointwiseWarps][kVoxels * round_up(kNarrow, 4)];
  load_weights<T, kNarrow>(p, weights);
  const Lane at;
  const float* const staged = inputs[at.warp] + at.row * 4;
  const int64_t step = int64_t{gridDim.x} * kPointwiseWarps * kVoxels;
  for (int64_t first = (int64_t{blockIdx.x} * kPointwiseWarps + at.warp) * kVoxels; first < p.voxels; first += step) {
    const int count = static_cast<int>(min(p.voxels - first, int64_t{kVoxels}));
    stage_narrow<T, kNarrow, kVoxels>(static_cast<const T*>(p.in) + first * kNarrow, count, inputs[at.warp]);
    T* out = static_cast<T*>(p.out) + first * p.wide;
    for (int c = at.part * kWidth; c < p.wide; c += kLanes * kWidth) {
      float sum[kDepth][kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float bias = weights[((c + j / 4 * 4) * kWeightRows + kNarrow * 4) + j % 4];
#pragma unroll
        for (int v = 0; v < kDepth; ++v) sum[v][j] = bias;
      }
#pragma unroll 1
      for (int k = 0; k < kNarrow; k += 4) {
        Vector<float, 4> x[kDepth];
#pragma unroll
        for (int v = 0; v < kDepth; ++v) x[v] = load_vector<float, 4>(staged + k * kVoxels + v * kRows * 4);
#pragma unroll
        for (int i = 0; i < std::min(4, kNarrow); ++i) {
          if (kNarrow % 4 > 0 && k + i >= kNarrow) break;
#pragma unroll
          for (int j = 0; j < kWidth; j += 4) {
            const auto weight = load_vector<float, 4>(weights + (c + j) * kWeightRows + (k + i) * 4);
#pragma unroll
            for (int v = 0; v < kDepth; ++v)
#pragma unroll
              for (int n = 0; n < 4; ++n) sum[v][j + n] = fmaf(x[v].v[i], weight.v[n], sum[v][j + n]);
          }
        }
      }
#pragma unroll
      for (int v = 0; v < kDepth; ++v) {
        Vector<T, kWidth> results;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) results.v[j] = convert<T>(max_or_nan(sum[v][j], p.epilogue.floor));
        const int row = v * kRows + at.row;
        if (row < count) store_words(out + row * p.wide + c, results);
      }
    }
  }
}

/// The parameters of pointwise_wgrad().
struct PointwiseWgradParams {
  const void* narrow;
  const void* wide;
  float* partial;  // (range, narrow channel, wide channel)
  int64_t voxels;
  int channels;  // number of wide channels
  int groups;    // warps among which the wide channels are divided
};

/// Computes partial sums. Launch: CTAs of kPointwiseWgradWarps warps in a 2-D grid of ranges of voxels by parts of the
/// wide channels.
template <class T, int kNarrow>
__global__ void __launch_bounds__(kWgradThreads, 1) pointwise_wgrad(const __grid_constant__ PointwiseWgradParams p) {
  constexpr int kWidth = kVectorWidth<T>, kColumns = kLanes * kWidth;
  constexpr int kTile = pointwise_wgrad_voxels(kNarrow), kStaged = kTile * round_up(kNarrow, 4);
  static_assert(kNarrow * kColumns <= kStaged);
  __shared__ __align__(16) float shared[kPointwiseWgradWarps * kStaged];
  const Lane at;
  const int slices = kPointwiseWgradWarps / p.groups, slice = at.warp / p.groups;
  const int first_group = static_cast<int>(blockIdx.y) * p.groups;
  const int c = (first_group + at.warp % p.groups) * kColumns + at.part * kWidth;
  float* const staged = shared + at.warp * kStaged;
  float sum[kNarrow][kWidth] = {};
  const int64_t step = int64_t{gridDim.x} * slices * kTile;
  for (int64_t first = (int64_t{blockIdx.x} * slices + slice) * kTile; slice < slices && first < p.voxels;
       first += step) {
    const int count = static_cast<int>(min(p.voxels - first, int64_t{kTile}));
    const T* wide = static_cast<const T*>(p.wide) + first * p.channels + c;
    PackedVector<T, kWidth> loaded[kTile / kRows];
#pragma unroll
    for (int v = 0; v < kTile / kRows; ++v) {
      const int row = v * kRows + at.row;
      loaded[v] = {wide + row * p.channels, row < count && c < p.channels, T(0.0f)};
    }
    stage_narrow<T, kNarrow, kTile>(static_cast<const T*>(p.narrow) + first * kNarrow, count, staged);
#pragma unroll
    for (int v = 0; v < kTile / kRows; ++v) {
      const auto x = loaded[v].get();
#pragma unroll
      for (int k = 0; k < kNarrow; k += 4) {
        const auto y = load_vector<float, 4>(staged + k * kTile + (v * kRows + at.row) * 4);
#pragma unroll
        for (int i = 0; i < 4 && k + i < kNarrow; ++i)
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[k + i][j] = fmaf(y.v[i], convert<float>(x.v[j]), sum[k + i][j]);
      }
    }
  }
  __syncthreads();  // all warps have read the staged tile
#pragma unroll
  for (int k = 0; k < kNarrow; ++k)
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      for (int distance = kLanes; distance < 32; distance *= 2) sum[k][j] += __shfl_xor_sync(~0u, sum[k][j], distance);
      if (at.row == 0) shared[(at.warp * kNarrow + k) * kColumns + at.part * kWidth + j] = sum[k][j];
    }
  __syncthreads();
  const int sums = p.groups * kNarrow * kColumns;  // sums of a slice
  for (int i = static_cast<int>(threadIdx.x); i < sums; i += kWgradThreads) {
    float total = 0;
    for (int s = 0; s < slices; ++s) total += shared[s * sums + i];
    const int column = i % kColumns, k = i / kColumns % kNarrow;
    const int channel = (first_group + i / (kColumns * kNarrow)) * kColumns + column;
    if (channel < p.channels) p.partial[(int64_t{blockIdx.x} * kNarrow + k) * p.channels + channel] = total;
  }
}

/// Calls body.operator()<T, kNarrow>() for the dtype and the number of narrow channels.
template <class Body>
void with_channels(DType dtype, int narrow, const Body& body) {
  dispatch(Types<float, BFloat16, Float16>(), dtype, "conv", "CUDA", [&]<class T>() {
    with_width<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16>(narrow, [&]<int kNarrow>() {
      if constexpr (kNarrow <= max_narrow_channels(sizeof(T))) body.template operator()<T, kNarrow>();
    });
  });
}

void run_wgrad(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch) {
  const View& w = call.w;
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  const PointwiseWgradParams p{.narrow = plan.wide_in ? call.out.data : call.in.data,
                               .wide = plan.wide_in ? call.in.data : call.out.data,
                               .partial = partial.as<float>(),
                               .voxels = plan.voxels,
                               .channels = plan.wide,
                               .groups = plan.groups};
  const int wide_axis = plan.wide_in ? 1 : 0;
  const StridedWeights sum(w, p.partial, plan.blocks, {wide_axis, 1 - wide_axis, 2, 3, 4});
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.grid_rows));
  with_channels(w.dtype, plan.narrow, [&]<class T, int kNarrow>() {
    pointwise_wgrad<T, kNarrow><<<grid, kWgradThreads, 0, launch.stream>>>(p);
    check_launch(call.op);
    reduce_ranges<T>(sum, launch.stream);
  });
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch) {
  if (call.pass == ConvPass::wgrad) return run_wgrad(call, problem, plan, launch);
  const View& w = call.w;
  const int in_axis = call.pass == ConvPass::dgrad ? 0 : 1, wide_axis = plan.wide_in ? in_axis : 1 - in_axis;
  const auto narrow_address = reinterpret_cast<uintptr_t>(plan.wide_in ? call.out.data : call.in.data);
  const PointwiseParams p{.in = call.in.data,
                          .weight = w.data,
                          .epilogue = EpilogueParams(call.epilogue),
                          .out = call.out.data,
                          .weight_narrow = w.stride[1 - wide_axis],
                          .weight_wide = w.stride[wide_axis],
                          .voxels = plan.voxels,
                          .wide = plan.wide,
                          .pitch = round_up(plan.wide, kLanes * 16 / static_cast<int>(item_size(w.dtype))),
                          .out_channels = static_cast<int>(problem.out_channels),
                          .aligned = narrow_address % 16 == 0};
  const auto shared_bytes = static_cast<size_t>(pointwise_weight_rows(plan.narrow) * p.pitch) * sizeof(float);
  with_channels(w.dtype, plan.narrow, [&]<class T, int kNarrow>() {
    const auto kernel = plan.wide_in ? pointwise_to_narrow<T, kNarrow> : pointwise_to_wide<T, kNarrow>;
    kernel<<<static_cast<unsigned>(plan.blocks), 32 * kPointwiseWarps, shared_bytes, launch.stream>>>(p);
  });
  check_launch(call.op);
}

}  // namespace voxgrad::cuda
