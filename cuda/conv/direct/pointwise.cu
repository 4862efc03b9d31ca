// 1x1x1 convolutions between a channels-last tensor with many channels (wide) and one with few channels (narrow): GEMMs
// with mma.sync for fprop and dgrad, and a SIMT GEMM with split-K for wgrad.
//
// Both tensors are lists of voxels, and a warp computes one tile of voxels after another. Four lanes share a voxel of
// the wide tensor, and each lane transfers vectors of its channels. In fprop and dgrad, these vectors are fragments of
// the tensor cores, because the channels are multiplied or stored in another order than that of memory. Memory limits
// these kernels, so float32 keeps its accuracy in all precisions. A tile of the narrow tensor is contiguous and is
// copied through shared memory.
#include "cuda/conv/direct/pointwise.cuh"

#include "cuda/conv/common/wgrad_reduce.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kLanes = kPointwiseLanes, kRows = 32 / kLanes;  // kRows: voxels that a warp stores at a time
constexpr int kVoxels = kPointwiseVoxels, kM16 = kVoxels / 16;
constexpr int kRowsOfLane = kVoxels / kRows, kStages = kPointwiseStages;
constexpr int kThreads = 32 * kPointwiseWarps, kWgradThreads = 32 * kPointwiseWgradWarps;

/// The parameters of pointwise_to_narrow() and pointwise_to_wide().
struct ChannelsLastParams : PointwiseParams {
  int chunks;    // chunks of wide channels: a vector for each of the 4 lanes
  bool aligned;  // the narrow tensor begins at a multiple of 16 bytes
};

/// The ring of a warp, into which each lane copies vectors of the wide tensor that only this lane reads: in each stage,
/// kChunks vectors of channels of each of kRowsOfLane voxels.
template <class T, int kChunks>
struct InputRing {
  static constexpr int kWidth = kVectorWidth<T>;
  const ChannelsLastParams& p;
  uint4* ring;
  int64_t tile;  // first voxel of the next tile
  int64_t step;  // voxels from one tile of the warp to the next
  int chunk = 0;

  /// Starts to copy the next stage. Voxels and channels that do not exist are zero.
  __device__ void copy(int stage) {
    const PointwiseLane at;
    const auto count = static_cast<int>(min(p.voxels - tile, int64_t{kVoxels}));
    const int c = (chunk * kLanes + at.part) * kWidth;
    const T* from = static_cast<const T*>(p.in) + (tile + at.row) * p.wide + c;
#pragma unroll
    for (int v = 0; v < kRowsOfLane; ++v, from += kRows * p.wide)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        cp_async(at_vector(stage, v, i), from + i * kLanes * kWidth,
                 v * kRows + at.row < count && c + i * kLanes * kWidth < p.wide);
    cp_async_commit();
    chunk += kChunks;
    if (chunk < p.chunks) return;
    chunk = 0;
    tile += step;
  }
  __device__ uint32_t at_vector(int stage, int row, int i) const {
    return shared_address(ring + ((stage * kRowsOfLane + row) * kChunks + i) * 32);
  }
};

/// Adds the products of a stage. Word `part` or part + 4 of a fragment is a word of a vector of the lane.
template <int kChunks, class Arithmetic, int kN8, class Ring>
__device__ void multiply_stage(Sums<Arithmetic, kM16, kN8>& sums, const Ring& ring, int stage, uint32_t weights) {
  uint32_t words[kRowsOfLane][kChunks][4];
#pragma unroll
  for (int i = 0; i < kRowsOfLane * kChunks; ++i)
    load_shared(ring.at_vector(stage, i / kChunks, i % kChunks), words[i / kChunks][i % kChunks]);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    uint32_t of_chunk[kN8][4];
#pragma unroll
    for (int n = 0; n < kN8; ++n) load_shared(weights + (chunk * kN8 + n) * 512, of_chunk[n]);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      uint32_t a[kM16][4], b[kN8][2];
#pragma unroll
      for (int i = 0; i < 4 * kM16; ++i) a[i / 4][i % 4] = words[i / 4 * 2 + i % 2][chunk][k + i % 4 / 2];
#pragma unroll
      for (int i = 0; i < 2 * kN8; ++i) b[i / 2][i % 2] = of_chunk[i / 2][k + i % 2];
      sums.multiply(a, b);
    }
  }
}

/// Computes narrow results from wide inputs. The results have at most 8 * kN8 channels. Launch: CTAs of
/// kPointwiseWarps warps in a 1-D grid. Dynamic shared memory: a ring for each warp, the weights in the order
/// [chunk][block of 8 channels][lane][word], and a tile of results for each warp.
template <class Arithmetic, int kN8, int kChunks>
__global__ void __launch_bounds__(kThreads, 2) pointwise_to_narrow(const __grid_constant__ ChannelsLastParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kWidth = kVectorWidth<T>, kRing = kStages * kRowsOfLane * kChunks * 32;
  extern __shared__ uint4 dynamic_shared[];
  const PointwiseLane at;
  const int narrow = p.narrow.value();
  uint4* const weights = dynamic_shared + kPointwiseWarps * kRing;
  const int64_t step = int64_t{gridDim.x} * kPointwiseWarps * kVoxels;
  int64_t first = (int64_t{blockIdx.x} * kPointwiseWarps + at.warp) * kVoxels;
  InputRing<T, kChunks> ring{p, dynamic_shared + at.warp * kRing + at.lane, first, step};
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) ring.copy(stage);
  list_weights<Arithmetic>(p, round_up(p.chunks, kChunks) * kN8 * 128, reinterpret_cast<uint32_t*>(weights),
                           [](int i, int e) {
                             const int lane = i / 4 % 32, word = i / (128 * kN8) * 16 + lane % 4 * 4 + i % 4;
                             return make_int2(i / 128 % kN8 * 8 + lane / 4, word * Arithmetic::kElements + e);
                           });
  T* const results = reinterpret_cast<T*>(weights + round_up(p.chunks, kChunks) * kN8 * 32);
  T* const staged = results + at.warp * kVoxels * narrow;
  float bias[kN8][2];
#pragma unroll
  for (int i = 0; i < 2 * kN8; ++i) {
    const int k = i / 2 * 8 + at.part * 2 + i % 2;
    bias[i / 2][i % 2] = k < narrow ? p.epilogue.bias_of<T>(k) : 0;
  }
  __syncthreads();
  for (int stage = 0; first < p.voxels; first += step) {
    Sums<Arithmetic, kM16, kN8> sums;
    uint32_t of_stage = shared_address(weights + at.lane);
    for (int chunk = 0; chunk < p.chunks; chunk += kChunks, of_stage += kChunks * kN8 * 512) {
      cp_async_wait<kStages - 2>();
      ring.copy(stage == 0 ? kStages - 1 : stage - 1);
      multiply_stage<kChunks>(sums, ring, stage, of_stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    __syncwarp();  // all lanes have stored the previous tile
#pragma unroll
    for (int i = 0; i < 4 * kM16 * kN8; ++i) {
      const int m = i / (4 * kN8), n = i / 4 % kN8, k = n * 8 + at.part * 2 + i % 2;
      const float result = max_or_nan(sums.total(m, n, i % 4) + bias[n][i % 2], p.epilogue.floor);
      if (k < narrow) staged[(m * 16 + i % 4 / 2 * 8 + at.row) * narrow + k] = convert<T>(result);
    }
    __syncwarp();
    T* const out = static_cast<T*>(p.out) + first * narrow;
    const int count = static_cast<int>(min(p.voxels - first, int64_t{kVoxels})) * narrow;
    if (p.aligned && count == kVoxels * narrow) {
#pragma unroll
      for (int i = at.lane * kWidth; i < kVoxels * 8 * kN8; i += 32 * kWidth)
        if (i < count) store_words(out + i, load_vector<T, kWidth>(staged + i));
    } else {
#pragma unroll 1
      for (int i = at.lane; i < count; i += 32) out[i] = staged[i];
    }
  }
  cp_async_wait<0>();
}

/// Loads a tile of the narrow tensor as operand A, through shared memory. Voxels from `count` on are zero.
template <class Arithmetic, int kSteps, int kPitch, class T>
__device__ void load_narrow(uint32_t (&a)[kSteps][kM16][4], const PointwiseParams& p, const T* from, int count,
                            const PointwiseLane& at, T* staged) {
  constexpr int kElements = Arithmetic::kElements, kMost = 8 * kSteps * kElements;
  T values[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= p.narrow.value()) break;
    values[i] = at.lane + i * 32 < count * p.narrow.value() ? from[at.lane + i * 32] : T(0.0f);
  }
  __syncwarp();  // all lanes have read the previous tile
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= p.narrow.value()) break;
    int voxel = at.lane + i * 32;
    const int k = p.narrow.take_digit(voxel);
    staged[voxel * kPitch * kElements + k] = values[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kSteps * kM16 * 4; ++i) {
    const int step = i / (4 * kM16), m = i / 4 % kM16;
    const int word = (m * 16 + i % 2 * 8 + at.row) * kPitch + step * 8 + i % 4 / 2 * 4 + at.part;
    T value[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) value[e] = staged[word * kElements + e];
    a[step][m][i % 4] = Arithmetic::word(value);
  }
}

/// Computes wide results from at most 8 * kN8 narrow inputs. Launch: CTAs of kPointwiseWarps warps in a 1-D grid.
/// Dynamic shared memory: the weights and the bias. The columns of a lane in all blocks of 8 columns of a chunk are the
/// channels of one vector, so the weights have the order [chunk][k-step][block][lane][word].
template <class Arithmetic, int kN8>
__global__ void __launch_bounds__(kThreads, pointwise_ctas(false, sizeof(typename Arithmetic::Element), 8 * kN8))
    pointwise_to_wide(const __grid_constant__ ChannelsLastParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kWidth = kVectorWidth<T>, kBlocks = kWidth / 2, kSteps = Arithmetic::kElements == 2 ? 1 : kN8;
  constexpr int kPitch = 8 * kSteps + 4;  // words of a voxel in shared memory; avoids bank conflicts
  extern __shared__ __align__(16) uint32_t weights[];
  __shared__ __align__(16) T inputs[kPointwiseWarps][kVoxels * kPitch * Arithmetic::kElements];
  const PointwiseLane at;
  T* const staged = inputs[at.warp];
  float* const bias = reinterpret_cast<float*>(weights) + p.chunks * kSteps * kBlocks * 64;
  for (int i = at.lane; i < kVoxels * kPitch * Arithmetic::kElements; i += 32) staged[i] = T(0.0f);
  list_weights<Arithmetic>(p, p.chunks * kSteps * kBlocks * 64, weights, [](int i, int e) {
    const int lane = i / 2 % 32, block = i / 64 % kBlocks, chunk = i / (64 * kBlocks * kSteps);
    const int word = i / (64 * kBlocks) % kSteps * 8 + i % 2 * 4 + lane % 4;
    return make_int2(word * Arithmetic::kElements + e, (chunk * kLanes + lane / 8) * kWidth + block * 2 + lane / 4 % 2);
  });
  for (int i = static_cast<int>(threadIdx.x); i < p.chunks * kLanes * kWidth; i += kThreads)
    bias[i] = i < p.wide ? p.epilogue.bias_of<T>(i) : 0;
  __syncthreads();
  const int64_t step = int64_t{gridDim.x} * kPointwiseWarps * kVoxels;
  for (int64_t first = (int64_t{blockIdx.x} * kPointwiseWarps + at.warp) * kVoxels; first < p.voxels; first += step) {
    const int count = static_cast<int>(min(p.voxels - first, int64_t{kVoxels}));
    uint32_t a[kSteps][kM16][4];
    load_narrow<Arithmetic, kSteps, kPitch>(a, p, static_cast<const T*>(p.in) + first * p.narrow.value(), count, at,
                                            staged);
    T* const out = static_cast<T*>(p.out) + first * p.wide;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const int c = (chunk * kLanes + at.part) * kWidth;
      Sums<Arithmetic, kM16, kBlocks> sums;
#pragma unroll
      for (int i = 0; i < kM16 * kBlocks * 4; ++i)
        sums.sum[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] = bias[c + i / 4 % kBlocks * 2 + i % 2];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[kBlocks][2];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint2 words =
              reinterpret_cast<const uint2*>(weights)[((chunk * kSteps + k) * kBlocks + n) * 32 + at.lane];
          b[n][0] = words.x, b[n][1] = words.y;
        }
        sums.multiply(a[k], b);
      }
#pragma unroll
      for (int v = 0; v < kRowsOfLane; ++v) {
        Vector<T, kWidth> results;
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          results.v[j] = convert<T>(max_or_nan(sums.total(v / 2, j / 2, v % 2 * 2 + j % 2), p.epilogue.floor));
        const int row = v * kRows + at.row;
        if (row < count && c < p.wide) store_words(out + row * p.wide + c, results);
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

/// Computes partial sums. Launch: CTAs of kPointwiseWgradWarps warps in a 2-D grid of ranges of voxels by parts of the
/// wide channels.
template <class T, int kNarrow>
__global__ void __launch_bounds__(kWgradThreads, 1) pointwise_wgrad(const __grid_constant__ PointwiseWgradParams p) {
  wait_for_previous_kernels();
  constexpr int kWidth = kVectorWidth<T>, kColumns = kLanes * kWidth;
  constexpr int kTile = pointwise_wgrad_voxels(kNarrow), kStaged = kTile * round_up(kNarrow, 4);
  static_assert(kNarrow * kColumns <= kStaged);
  __shared__ __align__(16) float shared[kPointwiseWgradWarps * kStaged];
  const PointwiseLane at;
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
      if constexpr (kNarrow <= max_narrow_channels(ConvPass::wgrad, sizeof(T), false))
        body.template operator()<T, kNarrow>();
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
    launch_kernel(call.op, pointwise_wgrad<T, kNarrow>, grid, kWgradThreads, 0, launch.stream, p);
    reduce_ranges<T>(sum, launch.stream);
  });
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch) {
  if (plan.planes) return run_planes(call, problem, plan, launch);
  if (call.pass == ConvPass::wgrad) return run_wgrad(call, problem, plan, launch);
  const auto narrow_address = reinterpret_cast<uintptr_t>(plan.wide_in ? call.out.data : call.in.data);
  const auto item_bytes = static_cast<int>(item_size(call.w.dtype));
  const ChannelsLastParams p{PointwiseParams(call, plan, plan.voxels), divide_up(plan.wide, kLanes * 16 / item_bytes),
                             narrow_address % 16 == 0};
  with_arithmetic(pointwise_arithmetic(problem), [&]<class Arithmetic>() {
    with_width<1, 2>(divide_up(plan.narrow, 8), [&]<int kN8>() {
      if constexpr (!std::is_same_v<Arithmetic, Tf32>)
        launch_kernel(call.op, !plan.wide_in ? pointwise_to_wide < Arithmetic,
                      Arithmetic::kElements == 2 ? 1 : kN8 >
                  : plan.chunks_of_stage == 1 ? pointwise_to_narrow<Arithmetic, kN8, 1>
                                              : pointwise_to_narrow<Arithmetic, kN8, 2>,
                      static_cast<unsigned>(plan.blocks), kThreads, plan.shared_bytes, launch.stream, p);
    });
  });
}

}  // namespace voxgrad::cuda
