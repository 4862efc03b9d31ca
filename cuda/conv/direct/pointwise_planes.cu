// 1x1x1 convolutions between a contiguous tensor with many channels (wide) and one with few channels (narrow): GEMMs
// with mma.sync.
//
// In these tensors, the voxels of each channel are contiguous. A vector of 16 bytes consists of neighboring voxels of
// one channel. The order of the voxels and of the channels in a product is free. The vectors of a lane are therefore
// fragments of the tensor cores, up to the exchange of two halves:
//
//   fprop and dgrad: A has voxels x input channels. A lane has the same voxels of 4 channels. Its voxels 2m and 2m + 1
//                    are in the rows g and g + 8 of m16 tile m. C has vectors of results of two channels.
//   wgrad:           A has wide channels x voxels, and B has voxels x narrow channels. A vector is four words along K.
//
// Eight neighboring lanes should access at least 64 neighboring bytes of GPU memory. Lanes that multiply have only 32,
// so inputs of products with wide inputs and all results of fprop and dgrad are exchanged through shared memory. Memory
// limits these kernels, so float32 keeps its accuracy in all precisions.
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/direct/pointwise.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kStages = kPointwiseStages, kVectors = kPlanesVectors, kSteps = kPlanesSteps;
constexpr int kThreads = 32 * kPointwiseWarps, kWgradThreads = 32 * kPointwiseWgradWarps;

/// The division of all voxels into tiles of a warp.
struct PlaneTiles {
  Divisor of_sample;  // tiles of a sample
  int count;          // tiles of all samples

  explicit PlaneTiles(const PointwisePlan& plan, int64_t samples)
      : of_sample(plan.tiles), count(static_cast<int>(plan.tiles * samples)) {}
};

/// The parameters of planes_to_narrow() and planes_to_wide(). Strides are along samples and channels, in elements.
struct PlanesParams : PointwiseParams {
  PlaneTiles tiles;
  int64_t in_stride[2];
  int64_t out_stride[2];
};

/// The sample of a tile, and the first voxel of vector `vector` of the tile.
template <class T, ConvPass kPass>
struct PlaneVoxels {
  int sample;
  int64_t voxel;

  __device__ PlaneVoxels(const PlaneTiles& tiles, int tile, int vector) : sample(tile) {
    voxel = (int64_t{tiles.of_sample.take_digit(sample)} * planes_tile(kPass) + vector) * kVectorWidth<T>;
  }
};

/// Loads a vector as four words, or zeros.
template <class T>
__device__ void load_words(uint32_t (&words)[4], const T* from, bool inside) {
  const uint4 loaded = PackedVector<T, kVectorWidth<T>>(from, inside, T(0.0f)).word;
  words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
}

/// The position of a thread when a warp transfers eight vectors of each of four channels to or from GPU memory.
struct TransferLane {
  int part = static_cast<int>(threadIdx.x) % 32 / 8;
  int vector = static_cast<int>(threadIdx.x) % 8;
};

/// Returns the position of a vector among the eight vectors of a channel in shared memory. Neither transfers nor lanes
/// that multiply have bank conflicts.
__device__ inline int swizzled(int part, int vector) { return vector ^ 2 * part; }

/// The ring of a warp: in each stage, kSteps steps of 16 channels, of which lane part t multiplies the channels 4t to
/// 4t + 3.
template <class T>
struct PlanesRing {
  const PlanesParams& p;
  uint4* ring;
  int tile;       // the next tile
  int tile_step;  // from one tile of the warp to the next
  int step = 0;   // the next step of 16 channels

  /// Starts to copy the next stage. Voxels and channels that do not exist are zero.
  __device__ void copy(int stage) {
    const TransferLane at;
    const PlaneVoxels<T, ConvPass::fprop> of_lane(p.tiles, tile, at.vector);
    const bool inside = tile < p.tiles.count && of_lane.voxel < p.voxels;
    const int first = step * 16 + at.part * kVectors;
    const T* from =
        static_cast<const T*>(p.in) + of_lane.sample * p.in_stride[0] + first * p.in_stride[1] + of_lane.voxel;
#pragma unroll
    for (int i = 0; i < kSteps * kVectors; ++i) {
      const int channel = i / kVectors * 16 + i % kVectors;
      cp_async(at_vector(stage, i, at.part, at.vector), from + channel * p.in_stride[1],
               inside && first + channel < p.wide);
    }
    cp_async_commit();
    step += kSteps;
    if (step * 16 < p.wide) return;
    step = 0;
    tile += tile_step;
  }
  /// Returns the address of vector i of a lane in a stage.
  __device__ uint32_t at_vector(int stage, int i, int part, int vector) const {
    return shared_address(ring + (stage * kSteps * kVectors + i) * 32 + part * 8 + swizzled(part, vector));
  }
};

/// Adds the products of vectors of four channels with the weights of these channels, of which a lane has the words of
/// operand B. Two halves of a word belong to neighboring voxels, and two words of operand A to neighboring channels.
template <class Arithmetic, int kM, int kN8>
__device__ void multiply_vectors(Sums<Arithmetic, kM, kN8>& sums, const uint32_t (&vector)[kVectors][4],
                                 uint32_t weights) {
  constexpr int kWords = kVectors / Arithmetic::kElements;  // along K
  uint32_t words[kN8][kWords];
#pragma unroll
  for (int n = 0; n < kN8; ++n) load_shared(weights + n * 32 * kWords * 4, words[n]);
#pragma unroll
  for (int k = 0; k < kWords; k += 2) {
    uint32_t a[kM][4], b[kN8][2];
#pragma unroll
    for (int i = 0; i < 4 * kM; ++i) {
      const int m = i / 4, row = i % 2, word = k + i % 4 / 2;
      if constexpr (Arithmetic::kElements == 2)
        a[m][i % 4] = __byte_perm(vector[2 * word][m], vector[2 * word + 1][m], row == 0 ? 0x5410 : 0x7632);
      else
        a[m][i % 4] = vector[word][2 * m + row];
    }
#pragma unroll
    for (int i = 0; i < 2 * kN8; ++i) b[i / 2][i % 2] = words[i / 2][k + i % 2];
    sums.multiply(a, b);
  }
}

/// The results of a tile. They are exchanged through shared memory, so that a warp stores vectors of four channels.
template <class T>
struct PlanesResult {
  const PlanesParams& p;
  uint4* staged;  // of the warp: 8 vectors of each of 8 channels
  T* to;          // the vector that this lane stores, in channel 0
  bool inside;    // this vector lies in the volume

  __device__ PlanesResult(const PlanesParams& params, uint4* staged_of_warp, int tile)
      : p(params), staged(staged_of_warp) {
    const PlaneVoxels<T, ConvPass::fprop> of_lane(p.tiles, tile, TransferLane().vector);
    to = static_cast<T*>(p.out) + of_lane.sample * p.out_stride[0] + of_lane.voxel;
    inside = of_lane.voxel < p.voxels;
  }
  /// Stores block n of the sums as the block of 8 channels that begins at `first`, of which `channels` exist.
  template <class AllSums>
  __device__ void store(const AllSums& sums, int n, int first, int channels) {
    constexpr int kWidth = kVectorWidth<T>;
    const PointwiseLane at;
    const TransferLane lane;
    __syncwarp();  // all lanes have read the previous block
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      Vector<T, kWidth> results;
#pragma unroll
      for (int v = 0; v < kWidth; ++v)
        results.v[v] = convert<T>(max_or_nan(sums.total(v / 2, n, c + v % 2 * 2), p.epilogue.floor));
      staged[(at.part * 2 + c) * 8 + swizzled(at.part, at.row)] = std::bit_cast<uint4>(results);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = i * 4 + lane.part;
      if (inside && channel < channels)
        __stwb(reinterpret_cast<uint4*>(to + (first + channel) * p.out_stride[1]),
               staged[channel * 8 + swizzled(channel / 2, lane.vector)]);
    }
  }
};

/// Copies the biases of `count` channels to shared memory, as float2[count / 2]. Missing channels have the bias 0.
template <class T>
__device__ void list_bias(const PlanesParams& p, int channels, int count, float2* to) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    reinterpret_cast<float*>(to)[i] = i < channels ? p.epilogue.bias_of<T>(i) : 0;
}

/// Sets the sums of a block of 8 channels to the bias. `bias` has the two channels of the lane.
template <class AllSums>
__device__ void add_bias(AllSums& sums, int n, float2 bias) {
#pragma unroll
  for (auto& of_m16 : sums.sum) {
    of_m16[n][0] = of_m16[n][2] = bias.x;
    of_m16[n][1] = of_m16[n][3] = bias.y;
  }
}

/// Computes at most 8 * kN8 channels from wide inputs. Launch: CTAs of kPointwiseWarps warps in a 1-D grid. Dynamic
/// shared memory: a ring for each warp, the weights in the order [step][block of 8 channels][lane][word], and the bias.
template <class Arithmetic, int kN8>
__global__ void __launch_bounds__(kThreads, planes_ctas(true, sizeof(typename Arithmetic::Element)))
    planes_to_narrow(const __grid_constant__ PlanesParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kM = kVectorWidth<T> / 2, kRing = kStages * kSteps * kVectors * 32;
  constexpr int kUnrolled = Arithmetic::kParts > 1 ? 1 : kSteps;  // otherwise, nvcc would spill registers
  constexpr int kWords = kVectors / Arithmetic::kElements;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint4 staged[kPointwiseWarps][64];
  const PointwiseLane at;
  uint4* const weights = dynamic_shared + kPointwiseWarps * kRing;
  const int tile_step = static_cast<int>(gridDim.x) * kPointwiseWarps;
  int tile = static_cast<int>(blockIdx.x) * kPointwiseWarps + at.warp;
  PlanesRing<T> ring{p, dynamic_shared + at.warp * kRing, tile, tile_step};
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) ring.copy(stage);
  const int steps = round_up(divide_up(p.wide, 16), kSteps);
  list_weights<Arithmetic>(p, steps * kN8 * 32 * kWords, reinterpret_cast<uint32_t*>(weights), [](int i, int e) {
    const int lane = i / kWords % 32, channel = lane % 4 * kVectors + i % kWords * Arithmetic::kElements + e;
    return make_int2(i / (32 * kWords) % kN8 * 8 + lane / 4, i / (32 * kWords * kN8) * 16 + channel);
  });
  auto* const bias = reinterpret_cast<float2*>(reinterpret_cast<uint32_t*>(weights) + steps * kN8 * 32 * kWords);
  list_bias<T>(p, p.narrow.value(), kN8 * 8, bias);
  __syncthreads();
  for (int stage = 0; tile < p.tiles.count; tile += tile_step) {
    Sums<Arithmetic, kM, kN8> sums;
#pragma unroll
    for (int n = 0; n < kN8; ++n) add_bias(sums, n, bias[n * 4 + at.part]);
    uint32_t of_step = shared_address(weights) + at.lane * kWords * 4;
    for (int i = 0; i < steps; i += kSteps) {
      cp_async_wait<kStages - 2>();
      __syncwarp();  // all lanes have copied their vectors of this stage and read those of the previous stage
      ring.copy(stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll(kUnrolled)
      for (int s = 0; s < kSteps; ++s, of_step += kN8 * 32 * kWords * 4) {
        uint32_t vectors[kVectors][4];
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          load_shared(ring.at_vector(stage, s * kVectors + v, at.part, at.row), vectors[v]);
        multiply_vectors(sums, vectors, of_step);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    PlanesResult<T> result(p, staged[at.warp], tile);
#pragma unroll
    for (int n = 0; n < kN8; ++n) result.store(sums, n, n * 8, p.narrow.value() - n * 8);
  }
  cp_async_wait<0>();
}

/// Computes wide results from at most 16 channels. Launch: CTAs of kPointwiseWarps warps in a 1-D grid. Dynamic shared
/// memory: the weights in the order [block of 8 channels][lane][word], and the bias.
template <class Arithmetic>
__global__ void __launch_bounds__(kThreads, planes_ctas(false, sizeof(typename Arithmetic::Element)))
    planes_to_wide(const __grid_constant__ PlanesParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kWidth = kVectorWidth<T>, kWords = kVectors / Arithmetic::kElements;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ uint4 staged[kPointwiseWarps][64];
  const PointwiseLane at;
  const int blocks = divide_up(p.wide, 8);
  auto* const weights = reinterpret_cast<uint32_t*>(dynamic_shared);
  auto* const bias = reinterpret_cast<float2*>(weights + blocks * 32 * kWords);
  list_weights<Arithmetic>(p, blocks * 32 * kWords, weights, [](int i, int e) {
    const int lane = i / kWords % 32, channel = lane % 4 * kVectors + i % kWords * Arithmetic::kElements + e;
    return make_int2(channel, i / (32 * kWords) * 8 + lane / 4);
  });
  list_bias<T>(p, p.wide, blocks * 8, bias);
  __syncthreads();
  const int tile_step = static_cast<int>(gridDim.x) * kPointwiseWarps;
  for (int tile = static_cast<int>(blockIdx.x) * kPointwiseWarps + at.warp; tile < p.tiles.count; tile += tile_step) {
    const PlaneVoxels<T, ConvPass::fprop> of_lane(p.tiles, tile, at.row);
    const bool inside = of_lane.voxel < p.voxels;
    const T* const from = static_cast<const T*>(p.in) + of_lane.sample * p.in_stride[0] + of_lane.voxel;
    PlanesResult<T> result(p, staged[at.warp], tile);
    uint32_t vectors[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int channel = at.part * kVectors + v;
      load_words(vectors[v], from + channel * p.in_stride[1], inside && channel < p.narrow.value());
    }
#pragma unroll 2
    for (int n = 0; n < blocks; ++n) {
      Sums<Arithmetic, kWidth / 2, 1> sums;
      add_bias(sums, 0, bias[n * 4 + at.part]);
      multiply_vectors(sums, vectors, shared_address(weights + (n * 32 + at.lane) * kWords));
      result.store(sums, 0, n * 8, p.wide - n * 8);
    }
  }
}

/// The parameters of planes_wgrad(). Strides are along samples and channels, in elements.
struct PlanesWgradParams {
  const void* narrow;
  const void* wide;
  float* partial;  // (range, narrow channel, wide channel)
  int64_t voxels;  // of a sample
  PlaneTiles tiles;
  int64_t narrow_stride[2];
  int64_t wide_stride[2];
  int narrow_channels;
  int channels;  // number of wide channels
  int groups;    // warps among which the wide channels are divided
};

/// Computes partial sums for at most 8 * kN8 narrow channels; a warp computes those of 16 wide channels. The products
/// of a tile are added on the tensor cores, which truncate, and the sums of tiles in float32. Launch: CTAs of
/// kPointwiseWgradWarps warps in a 2-D grid of ranges of voxels by parts of the wide channels.
template <class Arithmetic, int kN8>
__global__ void __launch_bounds__(kWgradThreads, 1) planes_wgrad(const __grid_constant__ PlanesWgradParams p) {
  wait_for_previous_kernels();
  using T = typename Arithmetic::Element;
  constexpr int kUnroll = planes_tile(ConvPass::wgrad) / kPointwiseLanes;
  __shared__ float shared[kPointwiseWgradWarps * kN8 * 8 * 16];
  const PointwiseLane at;
  const int slices = kPointwiseWgradWarps / p.groups, slice = at.warp / p.groups;
  const int first_group = static_cast<int>(blockIdx.y) * p.groups, group = at.warp % p.groups;
  const int channel = (first_group + group) * 16 + at.row;
  Accumulator total[kN8] = {};
  const int tile_step = static_cast<int>(gridDim.x) * slices;
  for (int tile = static_cast<int>(blockIdx.x) * slices + slice; slice < slices && tile < p.tiles.count;
       tile += tile_step) {
    const auto [sample, voxel] = PlaneVoxels<T, ConvPass::wgrad>(p.tiles, tile, at.part);
    const T* const wide = static_cast<const T*>(p.wide) + sample * p.wide_stride[0] + voxel;
    const T* const narrow = static_cast<const T*>(p.narrow) + sample * p.narrow_stride[0] + voxel;
    uint32_t x[kUnroll][2][4], y[kUnroll][kN8][4];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int next = u * kPointwiseLanes * kVectorWidth<T>;
      const bool inside = voxel + next < p.voxels;
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_words(x[u][m], wide + (channel + m * 8) * p.wide_stride[1] + next, inside && channel + m * 8 < p.channels);
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        const int k = n * 8 + at.row;
        load_words(y[u][n], narrow + k * p.narrow_stride[1] + next, inside && k < p.narrow_channels);
      }
    }
    Sums<Arithmetic, 1, kN8> sums;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const uint32_t a[1][4] = {{x[u][0][k], x[u][1][k], x[u][0][k + 1], x[u][1][k + 1]}};
        uint32_t b[kN8][2];
#pragma unroll
        for (int i = 0; i < 2 * kN8; ++i) b[i / 2][i % 2] = y[u][i / 2][k + i % 2];
        sums.multiply(a, b);
      }
#pragma unroll
    for (int i = 0; i < 4 * kN8; ++i) total[i / 4][i % 4] += sums.total(0, i / 4, i % 4);
  }
#pragma unroll
  for (int i = 0; i < 4 * kN8; ++i)
    shared[((at.warp * kN8 + i / 4) * 8 + at.part * 2 + i % 2) * 16 + at.row + i % 4 / 2 * 8] = total[i / 4][i % 4];
  __syncthreads();
  const int columns = kN8 * 8 * 16, of_slice = p.groups * columns;  // sums of a group and of a slice
  for (int i = static_cast<int>(threadIdx.x); i < of_slice; i += kWgradThreads) {
    float sum = 0;
    for (int s = 0; s < slices; ++s) sum += shared[s * of_slice + i];
    const int k = i / 16 % (kN8 * 8), c = (first_group + i / columns) * 16 + i % 16;
    if (k < p.narrow_channels && c < p.channels)
      p.partial[(int64_t{blockIdx.x} * p.narrow_channels + k) * p.channels + c] = sum;
  }
}

void run_planes_wgrad(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan,
                      const Launch& launch) {
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  const View &narrow = plan.wide_in ? call.out : call.in, &wide = plan.wide_in ? call.in : call.out;
  const PlanesWgradParams p{.narrow = narrow.data,
                            .wide = wide.data,
                            .partial = partial.as<float>(),
                            .voxels = plan.voxels / problem.batch,
                            .tiles = PlaneTiles(plan, problem.batch),
                            .narrow_stride = {narrow.stride[0], narrow.stride[1]},
                            .wide_stride = {wide.stride[0], wide.stride[1]},
                            .narrow_channels = plan.narrow,
                            .channels = plan.wide,
                            .groups = plan.groups};
  const int wide_axis = plan.wide_in ? 1 : 0;
  const StridedWeights sum(call.w, p.partial, plan.blocks, {wide_axis, 1 - wide_axis, 2, 3, 4});
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.grid_rows));
  with_arithmetic(pointwise_arithmetic(problem), [&]<class Arithmetic>() {
    with_width<1, 2>(divide_up(plan.narrow, 8), [&]<int kN8>() {
      if constexpr (!std::is_same_v<Arithmetic, Tf32>) {
        launch_kernel(call.op, planes_wgrad<Arithmetic, kN8>, grid, kWgradThreads, 0, launch.stream, p);
        reduce_ranges<typename Arithmetic::Element>(sum, launch.stream);
      }
    });
  });
}

}  // namespace

void run_planes(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch) {
  if (call.pass == ConvPass::wgrad) return run_planes_wgrad(call, problem, plan, launch);
  // The stride of a single sample may be no multiple of a vector.
  const PlanesParams p{PointwiseParams(call, plan, plan.voxels / problem.batch),
                       PlaneTiles(plan, problem.batch),
                       {problem.batch > 1 ? call.in.stride[0] : 0, call.in.stride[1]},
                       {call.out.stride[0], call.out.stride[1]}};
  with_arithmetic(pointwise_arithmetic(problem), [&]<class Arithmetic>() {
    with_width<1, 2>(divide_up(plan.narrow, 8), [&]<int kN8>() {
      if constexpr (!std::is_same_v<Arithmetic, Tf32>)
        launch_kernel(call.op, plan.wide_in ? planes_to_narrow<Arithmetic, kN8> : planes_to_wide<Arithmetic>,
                      static_cast<unsigned>(plan.blocks), kThreads, plan.shared_bytes, launch.stream, p);
    });
  });
}

}  // namespace voxgrad::cuda
