// Wgrad of depthwise convolutions of channels-last tensors: a direct SIMT convolution with TMA and split-K.
//
// Each lane computes one channel. A warp holds the sums of the K x K taps of one plane of the kernel. In one plane
// after another along the depth, the warp multiplies a patch of y by the inputs around the patch. The K warps of a
// patch read the same plane of x and different planes of y. TMA copies the planes to shared memory and fills positions
// outside of the volumes with zeros. Each CTA stores the sums of its tile, and a second kernel adds the sums of all
// tiles.
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/direct/depthwise.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kRows = kDepthwisePatch, kChannels = kDepthwiseChannels;

/// The constants and the products of one kernel size and stride.
template <class T, int K, int S>
struct WgradKernel {
  static constexpr int columns = depthwise_wgrad_columns(K, S), patches = depthwise_wgrad_patches(K);
  static constexpr int threads = 32 * K * patches;
  static constexpr int window = (columns - 1) * S + K;  ///< columns of x that a patch reads

  /// Adds the products of a patch of y and its inputs in x to the sums of a warp.
  __device__ static void add_patch(float (&sum)[K][K], const T* x, int x_pitch, const T* y, int y_pitch) {
    float dy[kRows][columns];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < columns; ++i) dy[r][i] = convert<float>(y[r * y_pitch + i * kChannels]);
#pragma unroll
    for (int row = 0; row < (kRows - 1) * S + K; ++row) {
      float in[window];
#pragma unroll
      for (int i = 0; i < window; ++i) in[i] = convert<float>(x[row * x_pitch + i * kChannels]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = row - r * S;
        if (ky < 0 || ky >= K) continue;
#pragma unroll
        for (int kx = 0; kx < K; ++kx)
#pragma unroll
          for (int i = 0; i < columns; ++i) sum[ky][kx] = fmaf(dy[r][i], in[i * S + kx], sum[ky][kx]);
      }
    }
  }
};

/// Copies the planes of x and y of a CTA tile to their rings of stages. Plane t of x arrives together with plane t / S
/// of y.
template <int S>
struct WgradLoader {
  const DepthwiseWgradParams& p;
  const DepthwiseTile& tile;
  uint32_t x_stages;  ///< address of the first stage of x
  uint32_t y_stages;  ///< address of the first stage of y
  uint32_t full;      ///< address of the first barrier that counts the copied bytes of a stage
  int y_planes;       ///< planes of y in the CTA tile

  __device__ void load(int plane) const {
    const auto stage = static_cast<uint32_t>(plane % p.tiles.stages);
    const bool has_y = plane % S == 0 && plane / S < y_planes;
    const uint32_t barrier = full + 8 * stage;
    expect_bytes(barrier, static_cast<uint32_t>(p.tiles.box_bytes + (has_y ? p.y_bytes : 0)));
    tma_load(x_stages + stage * p.tiles.stage_bytes, p.x, tile.channel, tile.begin[2] * S - p.padding[2],
             tile.begin[1] * S - p.padding[1], tile.begin[0] * S - p.padding[0] + plane, tile.sample, barrier);
    if (has_y)
      tma_load(y_stages + static_cast<uint32_t>(plane / S % p.y_stages * p.y_stage_bytes), p.y, tile.channel,
               tile.begin[2], tile.begin[1], tile.begin[0] + plane / S, tile.sample, barrier);
  }
};

/// Adds the sums of all patches of a CTA in shared memory, one patch after another, and stores the partial sums of the
/// CTA.
template <int K>
__device__ void store_sums(const DepthwiseWgradParams& p, const DepthwiseTile& tile, const float (&sum)[K][K], int tap,
                           int patch, int patches, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const sums = shared + tap * K * K * kChannels + lane;
  for (int turn = 0; turn < patches; ++turn) {
    __syncthreads();
    if (patch != turn) continue;
#pragma unroll
    for (int i = 0; i < K * K; ++i) sums[i * kChannels] = (turn > 0 ? sums[i * kChannels] : 0.0f) + sum[i / K][i % K];
  }
  __syncthreads();
  if (tile.channel + lane >= p.channels) return;
  float* const partial = p.partial + int64_t{tile.range} * K * K * K * p.channels + tile.channel + lane;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < K * K * K; i += static_cast<int>(blockDim.x) / 32)
    partial[int64_t{i} * p.channels] = shared[i * kChannels + lane];
}

/// Computes partial sums of the weight gradient. Launch: one CTA per CTA tile and 32 channels in a 1-D grid, K warps
/// per patch. Dynamic shared memory: the stages of x and y; later the sums of all taps.
template <class T, int K, int S>
__global__ void __launch_bounds__(WgradKernel<T, K, S>::threads, 1)
    depthwise_wgrad(const __grid_constant__ DepthwiseWgradParams p) {
  wait_for_previous_kernels();
  if (!VOXGRAD_HAS_WGMMA) return;
  using Kernel = WgradKernel<T, K, S>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ uint64_t barriers[2][kMaxDepthwiseStages];  // full, empty
  unsigned char* const shared = depthwise_shared(dynamic_shared);
  const int stages = p.tiles.stages, warps = static_cast<int>(blockDim.x) / 32;
  unsigned char* const y_stages = shared + stages * p.tiles.stage_bytes;

  const DepthwiseTile tile(p.tiles);
  const int y_planes = min(p.tiles.chunk, p.y_depth - tile.begin[0]), planes = (y_planes - 1) * S + K;
  const WgradLoader<S> loader{
      p, tile, shared_address(shared), shared_address(y_stages), shared_address(barriers[0]), y_planes};
  const uint32_t empty = shared_address(barriers[1]);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      init_barrier(loader.full + 8 * s, 1);
      init_barrier(empty + 8 * s, warps);
    }
    fence_barrier_init();
    for (int plane = 0; plane < min(stages, planes); ++plane) loader.load(plane);
  }
  __syncthreads();

  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32), lane = static_cast<int>(threadIdx.x) % 32;
  const int tap = warp % K, patch = warp / K;
  const int patch_y = patch / p.tiles.patches[1], patch_x = patch % p.tiles.patches[1];
  const int x_pitch = p.tiles.box[1] * kChannels, y_pitch = p.tiles.tile[1] * kChannels;
  const int x_offset = patch_y * kRows * S * x_pitch + patch_x * Kernel::columns * S * kChannels + lane;
  const int y_offset = patch_y * kRows * y_pitch + patch_x * Kernel::columns * kChannels + lane;
  const int first_z = tile.begin[0] * S - p.padding[0];

  float sum[K][K] = {};
  PipelineState state;
  for (int plane = 0; plane < planes; ++plane) {
    const int step = plane - tap, y_plane = step / S, z = first_z + plane;
    wait_barrier(loader.full + 8 * state.stage, state.round);
    if (step >= 0 && step % S == 0 && y_plane < y_planes && z >= 0 && z < p.x_depth)
      Kernel::add_patch(sum, reinterpret_cast<const T*>(shared + state.stage * p.tiles.stage_bytes) + x_offset, x_pitch,
                        reinterpret_cast<const T*>(y_stages + y_plane % p.y_stages * p.y_stage_bytes) + y_offset,
                        y_pitch);
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * state.stage);
    // Refill the stage of the previous plane, which the other warps have probably read by now.
    if (threadIdx.x == 0 && plane > 0 && plane - 1 + stages < planes) {
      wait_barrier(empty + 8 * ((plane - 1) % stages), (plane - 1) / stages);
      loader.load(plane - 1 + stages);
    }
    state.next(stages);
  }
  store_sums<K>(p, tile, sum, tap, patch, warps / K, reinterpret_cast<float*>(shared));
}

}  // namespace

void depthwise_wgrad(const ConvCall& call, const ConvProblem& problem, const DepthwisePlan& plan,
                     const Launch& launch) {
  const View& w = call.w;
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  DepthwiseWgradParams p{.x = depthwise_map(call.in, plan.box, plan, call.op),
                         .y = depthwise_map(call.out, plan.tile, plan, call.op),
                         .tiles = plan,
                         .partial = partial.as<float>(),
                         .x_depth = static_cast<int>(call.in.size[2]),
                         .y_depth = static_cast<int>(call.out.size[2]),
                         .channels = static_cast<int>(w.size[0])};
  for (int a = 0; a < 3; ++a) p.padding[a] = static_cast<int>(call.geometry.padding[a]);
  p.y_stages = depthwise_y_stages(plan.kernel, plan.stride, plan.stages);
  p.y_bytes = depthwise_box_bytes(plan.tile, plan.channels, w.dtype);
  p.y_stage_bytes = round_up(p.y_bytes, kDepthwiseAlignment);
  const StridedWeights sum(w, p.partial, plan.ctas / plan.channel_blocks, {0, 4, 3, 2, 1});
  with_depthwise_kernel(w.dtype, plan, [&]<class T, int K, int S>() {
    if (plan.tensor_cores)
      depthwise_mma_wgrad(call, plan, p, launch);
    else
      launch_kernel(call.op, depthwise_wgrad<T, K, S>, static_cast<unsigned>(plan.ctas),
                    32 * K * plan.patches[0] * plan.patches[1], plan.shared_bytes, launch.stream, p);
    reduce_ranges<T>(sum, launch.stream);
  });
}

}  // namespace voxgrad::cuda
