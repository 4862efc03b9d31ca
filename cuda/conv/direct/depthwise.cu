// Fprop and dgrad of depthwise convolutions of channels-last tensors: direct SIMT convolutions with TMA.
//
// Each lane computes one channel. A warp computes a patch of 4 x 4 positions in one plane after another along the
// depth. The warp adds each input plane to the accumulators of all output planes to which this plane contributes, so
// that the plane is read once. After the last input plane of an output plane, the warp stores the output plane. TMA
// copies the input planes to shared memory and fills positions outside of the volume with zeros.
#include "cuda/conv/direct/depthwise.cuh"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

constexpr int kPatch = kDepthwisePatch, kChannels = kDepthwiseChannels;

/// The geometry of fprop, a Form of the kernel below: output q reads input q * S + k - padding at tap k. Along the
/// depth, S input planes complete one output plane.
template <int K, int S>
struct Gather {
  static constexpr int kernel = K, stride = S;
  static constexpr bool transposed = false;
  static constexpr int phases = S;                     ///< input planes of a step along the depth
  static constexpr int done = 1;                       ///< output planes that a step completes
  static constexpr int planes = (K - 1) / S + 1;       ///< output planes in registers
  static constexpr int window = (kPatch - 1) * S + K;  ///< input rows and columns of a patch
  static constexpr int pitch = kPatch * S;             ///< input rows and columns from one patch to the next

  __device__ static int first_input(int begin, int padding) { return begin * S - padding; }
  __device__ static int steps(int size) { return size + planes - 1; }
  __device__ static int input_planes(int size) { return (size - 1) * S + K; }
  /// Returns the output position of plane 0 in a step. Plane j has this position minus j. A step completes the last
  /// plane.
  __device__ static int position(int begin, int step) { return begin + step; }
  static constexpr int offset(int plane) { return -plane; }
  static constexpr int first_done = planes - 1;
  /// Returns the plane to which tap k adds in a phase, or -1.
  static constexpr int plane_of(int k, int phase) { return k >= phase && (k - phase) % S == 0 ? (k - phase) / S : -1; }
  /// Returns the row or column of the window that output q of the patch reads at tap k.
  static constexpr int input_of(int q, int k) { return q * S + k; }
};

/// The geometry of dgrad with stride 2: output o reads input i = (o + padding - k) / 2 at tap k, if i is an integer.
/// The padding and the center of the kernel must both be even or both be odd. Along the depth, an input plane completes
/// two output planes. The members have the same meanings as those of Gather.
template <int K>
struct Scatter {
  static constexpr int kernel = K;
  static constexpr bool transposed = true;
  static constexpr int phases = 1;
  static constexpr int done = 2;
  static constexpr int planes = K;
  static constexpr int center = K / 2;
  static constexpr int reach = center / 2;  ///< inputs that a patch reads before the input at its first output
  static constexpr int window = (kPatch - 1 + center) / 2 + reach + 1;
  static constexpr int pitch = kPatch / 2;

  __device__ static int first_input(int begin, int padding) { return (begin + padding - center) / 2 - reach; }
  __device__ static int steps(int size) { return (size - 1 + center) / 2 + reach + 1; }
  __device__ static int input_planes(int size) { return steps(size); }
  /// Returns the output position of plane 0 in a step. Plane j has this position plus j. A step completes planes 0
  /// and 1.
  __device__ static int position(int begin, int step) { return begin + 2 * (step - reach) - center; }
  static constexpr int offset(int plane) { return plane; }
  static constexpr int first_done = 0;
  static constexpr int plane_of(int k, int) { return k; }
  /// Returns the row or column of the window that output q of the patch reads at tap k, or -1.
  static constexpr int input_of(int q, int k) { return (q + center + k) % 2 == 0 ? (q + center - k) / 2 + reach : -1; }
};

/// Copies the weights of the CTA's channels to shared memory, as [tap][channel].
template <int K>
__device__ void load_weights(const DepthwiseParams& p, int channel, float* weights) {
  constexpr int kTaps = K * K * K;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int c = min(channel + lane, p.channels - 1);  // results of further channels are not stored
#pragma unroll 16
  for (int tap = static_cast<int>(threadIdx.x) / 32; tap < kTaps; tap += static_cast<int>(blockDim.x) / 32)
    weights[tap * kChannels + lane] = p.weights[int64_t{p.flipped ? kTaps - 1 - tap : tap} * p.channels + c];
}

/// The accumulators of one lane: a patch of each output plane that is not complete.
template <class T, class Form>
struct PatchSums {
  static constexpr int K = Form::kernel, kWindow = Form::window;
  float sum[Form::planes][kPatch][kPatch];

  /// Adds the products with row `ky` of the taps of all planes. `x` holds the window from `row` on. Only the planes in
  /// [first, last] belong to the chunk.
  template <int kPhase, bool kAll, int kRows>
  __device__ void add_row(const float (&x)[kRows][kWindow], const float* weights, int ky, int row, int first,
                          int last) {
#pragma unroll
    for (int kd = 0; kd < K; ++kd) {
      const int plane = Form::plane_of(kd, kPhase);
      if (plane < 0 || (!kAll && (plane < first || plane > last))) continue;
#pragma unroll
      for (int kx = 0; kx < K; ++kx) {
        const float w = weights[(kd * K * K + kx) * kChannels];
#pragma unroll
        for (int y = 0; y < kPatch; ++y) {
          const int from = Form::input_of(y, ky) - row;
          if (from < 0) continue;
#pragma unroll
          for (int i = 0; i < kPatch; ++i)
            if (const int column = Form::input_of(i, kx); column >= 0)
              sum[plane][y][i] = fmaf(w, x[from][column], sum[plane][y][i]);
        }
      }
    }
  }

  /// Adds an input plane. `in` points to the first input of the patch in the lane's channel. `pitch` is the number of
  /// elements from one row to the next.
  template <int kPhase, bool kAll>
  __device__ void add_plane(const T* in, int pitch, const float* weights, int first, int last) {
    if constexpr (Form::transposed) {
      float x[kWindow][kWindow];
#pragma unroll
      for (int y = 0; y < kWindow; ++y)
#pragma unroll
        for (int i = 0; i < kWindow; ++i) x[y][i] = convert<float>(in[y * pitch + i * kChannels]);
#pragma unroll
      for (int ky = 0; ky < K; ++ky) add_row<kPhase, kAll>(x, weights + ky * K * kChannels, ky, 0, first, last);
    } else {
      constexpr int kUnroll = K == 3 ? K : 1;  // the body of larger kernels fills the instruction cache
#pragma unroll kUnroll
      for (int ky = 0; ky < K; ++ky) {
        constexpr int kRows = (kPatch - 1) * Form::stride + 1;
        float x[kRows][kWindow];
#pragma unroll
        for (int y = 0; y < kRows; y += Form::stride)
#pragma unroll
          for (int i = 0; i < kWindow; ++i) x[y][i] = convert<float>(in[(y + ky) * pitch + i * kChannels]);
        add_row<kPhase, kAll>(x, weights + ky * K * kChannels, 0, 0, first, last);
      }
    }
  }

  /// Writes the results of a plane to shared memory. `out` points to the first output of the patch in the lane's
  /// channel.
  __device__ void write(int plane, T* out, int pitch, float bias, float floor) const {
#pragma unroll
    for (int y = 0; y < kPatch; ++y)
#pragma unroll
      for (int i = 0; i < kPatch; ++i)
        out[y * pitch + i * kChannels] = convert<T>(max_or_nan(sum[plane][y][i] + bias, floor));
  }

  /// Removes the planes that a step completed.
  __device__ void advance() {
#pragma unroll
    for (int n = 0; n < Form::planes; ++n) {
      const int plane = Form::transposed ? n : Form::planes - 1 - n;
      const int from = Form::transposed ? plane + Form::done : plane - Form::done;
#pragma unroll
      for (int y = 0; y < kPatch; ++y)
#pragma unroll
        for (int i = 0; i < kPatch; ++i) sum[plane][y][i] = from >= 0 && from < Form::planes ? sum[from][y][i] : 0.0f;
    }
  }
};

/// Copies input planes of a CTA tile to the ring of stages, and output planes back.
struct PlaneCopies {
  const DepthwiseParams& p;
  const DepthwiseTile& tile;
  uint32_t stages;    ///< address of the first stage
  uint32_t barriers;  ///< address of the first barrier
  uint32_t outputs;   ///< address of the first output plane
  int first_in[3];    ///< first input position of the tile along each axis

  /// Initializes the barriers and loads the first planes.
  __device__ void start(int planes) const {
    for (int s = 0; s < p.tiles.stages; ++s) init_barrier(barriers + 8 * s, 1);
    fence_barrier_init();
    for (int plane = 0; plane < min(p.tiles.stages, planes); ++plane) load(plane);
  }
  __device__ void load(int plane) const {
    const auto stage = static_cast<uint32_t>(plane % p.tiles.stages);
    expect_bytes(barriers + 8 * stage, static_cast<uint32_t>(p.tiles.box_bytes));
    tma_load(stages + stage * p.tiles.stage_bytes, p.in, tile.channel, first_in[2], first_in[1], first_in[0] + plane,
             tile.sample, barriers + 8 * stage);
  }
  __device__ void store(int buffer, int plane) const {
    tma_store(p.out, outputs + static_cast<uint32_t>(buffer * p.output_bytes), tile.channel, tile.begin[2],
              tile.begin[1], plane, tile.sample);
  }
};

/// The threads per CTA and the CTAs per SM. Together, they bound the registers of a thread.
template <class Form>
struct Occupancy {
  static constexpr int threads = 32 * kMaxDepthwiseWarps;
  static constexpr int registers = Form::planes * kPatch * kPatch + kPatch * Form::window + 40;  // estimate
  static constexpr int ctas = registers > 170 ? 2 : registers > 135 ? 3 : 4;
};

/// Computes fprop or dgrad. Launch: one CTA per CTA tile and 32 channels in a 1-D grid, one warp per patch. Dynamic
/// shared memory: the stages, the weights in float, and the output planes of two steps.
template <class T, class Form>
__global__ void __launch_bounds__(Occupancy<Form>::threads, Occupancy<Form>::ctas)
    depthwise(const __grid_constant__ DepthwiseParams p) {
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ uint64_t barriers[kMaxDepthwiseStages];
  unsigned char* const shared = depthwise_shared(dynamic_shared);
  const int stages = p.tiles.stages, lane = static_cast<int>(threadIdx.x) % 32;
  float* const weights = reinterpret_cast<float*>(shared + stages * p.tiles.stage_bytes);
  unsigned char* const outputs =
      reinterpret_cast<unsigned char*>(weights + Form::kernel * Form::kernel * Form::kernel * kChannels);

  const DepthwiseTile tile(p.tiles);
  const int begin = tile.begin[0];
  const int end = min(begin + p.tiles.chunk, p.out_depth);
  const int planes = Form::input_planes(end - begin), steps = Form::steps(end - begin);
  PlaneCopies copies{p, tile, shared_address(shared), shared_address(barriers), shared_address(outputs), {}};
  for (int a = 0; a < 3; ++a) copies.first_in[a] = Form::first_input(tile.begin[a], p.padding[a]);
  if (threadIdx.x == 0) copies.start(planes);
  load_weights<Form::kernel>(p, tile.channel, weights);
  __syncthreads();

  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int patch_y = warp / p.tiles.patches_x, patch_x = warp % p.tiles.patches_x;
  const int pitch = p.tiles.box[1] * kChannels, out_pitch = p.tiles.tile[1] * kChannels;
  const int in_offset = patch_y * Form::pitch * pitch + patch_x * Form::pitch * kChannels + lane;
  const int out_offset = patch_y * kPatch * out_pitch + patch_x * kPatch * kChannels + lane;
  const int channel = tile.channel + lane;
  const float bias =
      p.bias && channel < p.channels ? convert<float>(static_cast<const T*>(p.bias)[channel * p.bias_stride]) : 0.0f;

  PatchSums<T, Form> sums{};
  PipelineState state;
  for (int step = 0; step < steps; ++step) {
    const int position = Form::position(begin, step);
    const int first = Form::transposed ? begin - position : position - end + 1;
    const int last = Form::transposed ? end - 1 - position : position - begin;
    const bool all = first <= 0 && last >= Form::planes - 1;
    const auto add_phase = [&]<int kPhase>() {
      const int plane = step * Form::phases + kPhase;
      if (plane >= planes) return;
      wait_barrier(copies.barriers + 8 * state.stage, state.round);
      const T* in = reinterpret_cast<const T*>(shared + state.stage * p.tiles.stage_bytes) + in_offset;
      if (const int z = copies.first_in[0] + plane; z >= 0 && z < p.in_depth) {
        if (all)
          sums.template add_plane<kPhase, true>(in, pitch, weights + lane, first, last);
        else
          sums.template add_plane<kPhase, false>(in, pitch, weights + lane, first, last);
      }
      state.next(stages);
    };
    add_phase.template operator()<0>();
    if constexpr (Form::phases > 1) add_phase.template operator()<1>();

    const int buffer = step % 2 * Form::done;
#pragma unroll
    for (int done = 0; done < Form::done; ++done) {
      const int plane = Form::first_done + done;
      if (plane < first || plane > last) continue;
      T* const out = reinterpret_cast<T*>(outputs + (buffer + done) * p.output_bytes) + out_offset;
      sums.write(plane, out, out_pitch, bias, p.floor);
    }
    sums.advance();
    fence_async_proxy();
    if (threadIdx.x == 0) bulk_store_wait<0>();  // the buffers of the previous step are free
    __syncthreads();                             // all warps have read the stages and written their outputs
    if (threadIdx.x > 0) continue;
    for (int plane = step * Form::phases + stages; plane < min((step + 1) * Form::phases + stages, planes); ++plane)
      copies.load(plane);
    for (int done = 0; done < Form::done; ++done)
      if (const int plane = Form::first_done + done; plane >= first && plane <= last)
        copies.store(buffer + done, position + Form::offset(plane));
    bulk_store_commit();
  }
  if (threadIdx.x == 0) bulk_store_wait<0>();
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const DepthwisePlan& plan, const Launch& launch) {
  if (call.pass == ConvPass::wgrad) return depthwise_wgrad(call, problem, plan, launch);
  const View *bias = call.epilogue.bias, &w = call.w;
  const bool flipped = call.pass == ConvPass::dgrad && !plan.transposed;
  const Workspace weights(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  View packed = w;
  packed.data = weights.as<void>();
  packed.dtype = DType::f32;
  int64_t stride = 1;
  for (const int axis : {0, 1, 4, 3, 2}) {
    packed.stride[axis] = stride;
    stride *= w.size[axis];
  }
  kernel::copy(packed, w);
  DepthwiseParams p{.in = depthwise_map(call.in, plan.box, plan, call.op),
                    .out = depthwise_map(call.out, plan.tile, plan, call.op),
                    .tiles = depthwise_tiles(plan, w.dtype),
                    .weights = weights.as<float>(),
                    .flipped = flipped,
                    .bias = bias ? bias->data : nullptr,
                    .bias_stride = bias ? bias->stride[0] : 0,
                    .in_depth = static_cast<int>(call.in.size[2]),
                    .out_depth = static_cast<int>(call.out.size[2]),
                    .channels = static_cast<int>(w.size[0]),
                    .floor = call.epilogue.relu ? 0 : -INFINITY};
  p.output_bytes = depthwise_box_bytes(plan.tile, plan.channels, w.dtype);
  for (int a = 0; a < 3; ++a) {
    const int padding = static_cast<int>(call.geometry.padding[a]);
    p.padding[a] = flipped ? plan.kernel - 1 - padding : padding;
  }
  if (plan.tensor_cores) return depthwise_mma(call, plan, p, launch);
  with_depthwise_kernel(w.dtype, plan, [&]<class T, int K, int S>() {
    const auto start = [&](auto* function) {
      launch_with_shared(function, static_cast<unsigned>(plan.ctas), 32 * plan.patches[0] * plan.patches[1],
                         plan.shared_bytes, launch.stream, p);
    };
    if (!plan.transposed) return start(depthwise<T, Gather<K, S>>);
    if constexpr (S > 1) start(depthwise<T, Scatter<K>>);
  });
  check_launch(call.op);
}

}  // namespace voxgrad::cuda
