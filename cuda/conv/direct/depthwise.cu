// Fprop and dgrad of depthwise convolutions of channels-last tensors: direct SIMT convolutions with TMA.
//
// Each lane computes one channel. A warp computes a patch of 4 x 4 positions in one plane after another along the
// depth. The warp adds each input plane to the accumulators of all output planes to which this plane contributes, so
// that the plane is read once. After the last input plane of an output plane, the warp stores the output plane. TMA
// copies the input planes to shared memory and fills positions outside of the volume with zeros.
#include "cuda/conv/direct/depthwise.cuh"

namespace voxgrad::cuda {
namespace {

constexpr int kPatch = kDepthwisePatch, kChannels = kDepthwiseChannels, kWeightPitch = kDepthwiseWeightPitch;

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
        const float w = weights[(kd * K * K + kx) * kWeightPitch];
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
    if constexpr (Form::transposed && K > 5) {
      // Even taps contribute to every second output row, and odd taps to the other rows. Unrolling all taps would not
      // make the kernel faster, but nvcc would take 40 seconds longer.
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int top = (Form::center + parity) % 2;  // the first of these output rows
#pragma unroll 1
        for (int ky = parity; ky < K; ky += 2) {
          float x[kPatch / 2][kWindow];
#pragma unroll
          for (int y = 0; y < kPatch / 2; ++y)
#pragma unroll
            for (int i = 0; i < kWindow; ++i)
              x[y][i] = convert<float>(in[(Form::input_of(top, ky) + y) * pitch + i * kChannels]);
          add_row<kPhase, kAll>(x, weights + ky * K * kWeightPitch, parity, Form::input_of(top, parity), first, last);
        }
      }
    } else if constexpr (Form::transposed) {
      float x[kWindow][kWindow];
#pragma unroll
      for (int y = 0; y < kWindow; ++y)
#pragma unroll
        for (int i = 0; i < kWindow; ++i) x[y][i] = convert<float>(in[y * pitch + i * kChannels]);
#pragma unroll
      for (int ky = 0; ky < K; ++ky) add_row<kPhase, kAll>(x, weights + ky * K * kWeightPitch, ky, 0, first, last);
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
        add_row<kPhase, kAll>(x, weights + ky * K * kWeightPitch, 0, 0, first, last);
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

/// A step along the depth: the planes of the sums that belong to the chunk of the CTA.
template <class Form>
struct DepthStep {
  int number;
  int position;  ///< output position of plane 0
  int first;
  int last;

  __device__ DepthStep(int step, int begin, int end)
      : number(step),
        position(Form::position(begin, step)),
        first(Form::transposed ? begin - position : position - end + 1),
        last(Form::transposed ? end - 1 - position : position - begin) {}
  __device__ bool contains(int plane) const { return plane >= first && plane <= last; }
  /// Returns the first of the two sets of output planes in shared memory, which the steps use in turn.
  __device__ int buffer() const { return number % 2 * Form::done; }
};

/// The dynamic shared memory of a CTA. The number of stages and the sizes of planes depend on the plan.
template <class T, class Form>
struct DepthwiseShared {
  unsigned char* stages;   ///< ring of input planes
  unsigned char* outputs;  ///< output planes of two steps
  float* weights;          ///< [tap][kWeightPitch channels]
  int stage_bytes;
  int output_bytes;

  __device__ DepthwiseShared(const DepthwiseParams& p, unsigned char* memory)
      : stages(depthwise_shared(memory)),
        outputs(stages + p.tiles.stages * p.tiles.stage_bytes),
        weights(reinterpret_cast<float*>(outputs + 2 * Form::done * p.output_bytes)),
        stage_bytes(p.tiles.stage_bytes),
        output_bytes(p.output_bytes) {}
  __device__ const T* input(int stage) const { return reinterpret_cast<const T*>(stages + stage * stage_bytes); }
  __device__ T* output(int buffer) const { return reinterpret_cast<T*>(outputs + buffer * output_bytes); }
};

/// Copies input planes of a CTA tile to the ring of stages, and output planes back.
struct PlaneCopies {
  const DepthwiseParams& p;
  const DepthwiseTile& tile;
  uint32_t stages;    ///< address of the first stage
  uint32_t barriers;  ///< address of the first barrier
  uint32_t outputs;   ///< address of the first output plane
  int planes;         ///< input planes of the tile
  int first_in[3];    ///< first input position of the tile along each axis

  /// Initializes the barriers and loads the first planes.
  __device__ void start() const {
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
  /// Loads planes to the stages that a step has read, and stores the output planes that the step completed.
  template <class Form>
  __device__ void exchange(const DepthStep<Form>& step) const {
    const int next = step.number * Form::phases + p.tiles.stages;
    for (int plane = next; plane < min(next + Form::phases, planes); ++plane) load(plane);
    for (int done = 0; done < Form::done; ++done)
      if (const int plane = Form::first_done + done; step.contains(plane))
        store(step.buffer() + done, step.position + Form::offset(plane));
    bulk_store_commit();
  }
};

/// The threads per CTA and the CTAs per SM. Together, they bound the registers of a thread.
template <class Form>
struct Occupancy {
  static constexpr int threads = 32 * kMaxDepthwiseWarps;
  static constexpr int registers = Form::planes * kPatch * kPatch + kPatch * Form::window + 40;  // estimate
  static constexpr int ctas = registers > 170 ? 2 : registers > 135 ? 3 : 4;
};

/// The mainloop and the epilogue of a warp: adds input planes to the sums of a patch, and writes complete output planes
/// to shared memory.
template <class T, class Form>
struct PatchMainloop {
  const DepthwiseParams& p;
  const DepthwiseShared<T, Form>& shared;
  const PlaneCopies& copies;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int in_pitch;    ///< elements from one row of an input plane to the next
  int out_pitch;   ///< elements from one row of an output plane to the next
  int in_offset;   ///< elements from the beginning of an input plane to the patch
  int out_offset;  ///< elements from the beginning of an output plane to the patch
  float bias = 0;
  PatchSums<T, Form> sums{};
  PipelineState state;

  __device__ PatchMainloop(const DepthwiseParams& params, const DepthwiseShared<T, Form>& memory,
                           const PlaneCopies& planes)
      : p(params), shared(memory), copies(planes) {
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
    const int patch_y = warp / p.tiles.patches[1], patch_x = warp % p.tiles.patches[1];
    in_pitch = p.tiles.box[1] * kChannels;
    out_pitch = p.tiles.tile[1] * kChannels;
    in_offset = patch_y * Form::pitch * in_pitch + patch_x * Form::pitch * kChannels + lane;
    out_offset = patch_y * kPatch * out_pitch + patch_x * kPatch * kChannels + lane;
    if (const int channel = copies.tile.channel + lane; channel < p.channels) bias = p.epilogue.bias_of<T>(channel);
  }

  /// Adds the input plane of a phase of a step, if the chunk has this plane.
  template <int kPhase>
  __device__ void add_plane(const DepthStep<Form>& step) {
    const int plane = step.number * Form::phases + kPhase, first = step.first, last = step.last;
    const bool all = first <= 0 && last >= Form::planes - 1;
    if (plane >= copies.planes) return;
    wait_barrier(copies.barriers + 8 * state.stage, state.round);
    if (const int z = copies.first_in[0] + plane; z >= 0 && z < p.in_depth) {
      const T* const in = shared.input(state.stage) + in_offset;
      if (all)
        sums.template add_plane<kPhase, true>(in, in_pitch, shared.weights + lane, first, last);
      else
        sums.template add_plane<kPhase, false>(in, in_pitch, shared.weights + lane, first, last);
    }
    state.next(p.tiles.stages);
  }
  /// Writes the output planes that a step completed, and removes their sums.
  __device__ void write_planes(const DepthStep<Form>& step) {
#pragma unroll
    for (int done = 0; done < Form::done; ++done)
      if (const int plane = Form::first_done + done; step.contains(plane))
        sums.write(plane, shared.output(step.buffer() + done) + out_offset, out_pitch, bias, p.epilogue.floor);
    sums.advance();
  }
};

/// Computes fprop or dgrad. Launch: one CTA per CTA tile and 32 channels in a 1-D grid, one warp per patch. Dynamic
/// shared memory: DepthwiseShared.
template <class T, class Form>
__global__ void __launch_bounds__(Occupancy<Form>::threads, Occupancy<Form>::ctas)
    depthwise(const __grid_constant__ DepthwiseParams p) {
  wait_for_previous_kernels();
  if (!VOXGRAD_HAS_WGMMA) return;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ uint64_t barriers[kMaxDepthwiseStages];
  const DepthwiseShared<T, Form> shared(p, dynamic_shared);
  const DepthwiseTile tile(p.tiles);
  const int begin = tile.begin[0], end = min(begin + p.tiles.chunk, p.out_depth);
  PlaneCopies copies{p,
                     tile,
                     shared_address(shared.stages),
                     shared_address(barriers),
                     shared_address(shared.outputs),
                     Form::input_planes(end - begin),
                     {}};
  for (int a = 0; a < 3; ++a) copies.first_in[a] = Form::first_input(tile.begin[a], p.padding[a]);
  if (threadIdx.x == 0) copies.start();
  load_depthwise_weights<T, Form::kernel, kChannels, kWeightPitch, 1>(p, tile.channel, shared.weights);
  __syncthreads();

  PatchMainloop<T, Form> mainloop(p, shared, copies);
  const int steps = Form::steps(end - begin);
  for (int number = 0; number < steps; ++number) {
    const DepthStep<Form> step(number, begin, end);
    mainloop.template add_plane<0>(step);
    if constexpr (Form::phases > 1) mainloop.template add_plane<1>(step);
    mainloop.write_planes(step);
    fence_async_proxy();
    if (threadIdx.x == 0) bulk_store_wait<0>();  // the buffers of the previous step are free
    __syncthreads();                             // all warps have read the stages and written their outputs
    if (threadIdx.x == 0) copies.exchange(step);
  }
  if (threadIdx.x == 0) bulk_store_wait<0>();
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const DepthwisePlan& plan, const Launch& launch) {
  if (call.pass == ConvPass::wgrad) return depthwise_wgrad(call, problem, plan, launch);
  const View& w = call.w;
  const bool flipped = call.pass == ConvPass::dgrad && !plan.transposed;  // the taps in reverse order
  DepthwiseParams p{.in = depthwise_map(call.in, plan.box, plan, call.op),
                    .out = depthwise_map(call.out, plan.tile, plan, call.op),
                    .tiles = plan,
                    .epilogue = EpilogueParams(call.epilogue),
                    .in_depth = static_cast<int>(call.in.size[2]),
                    .out_depth = static_cast<int>(call.out.size[2]),
                    .channels = static_cast<int>(w.size[0])};
  p.output_bytes = depthwise_box_bytes(plan.tile, plan.channels, w.dtype);
  int64_t first_tap = 0;
  p.weight_stride[0] = w.stride[0];
  for (int a = 0; a < 3; ++a) {
    const int padding = static_cast<int>(call.geometry.padding[a]);
    p.padding[a] = flipped ? plan.kernel - 1 - padding : padding;
    p.weight_stride[a + 1] = flipped ? -w.stride[a + 2] : w.stride[a + 2];
    if (flipped) first_tap += (plan.kernel - 1) * w.stride[a + 2];
  }
  p.weights = w.as<char>() + first_tap * item_size(w.dtype);
  if (plan.tensor_cores) return depthwise_mma(call, plan, p, launch);
  with_depthwise_kernel(w.dtype, plan, [&]<class T, int K, int S>() {
    const auto start = [&](auto* function) {
      launch_kernel(call.op, function, static_cast<unsigned>(plan.ctas), 32 * plan.patches[0] * plan.patches[1],
                    plan.shared_bytes, launch.stream, p);
    };
    if (!plan.transposed) return start(depthwise<T, Gather<K, S>>);
    if constexpr (S > 1) start(depthwise<T, Scatter<K>>);
  });
}

}  // namespace voxgrad::cuda
