// Dgrad of convolutions whose result has few channels: a GEMM with wgmma whose rows are inputs, whose K dimension
// consists of the input channels, and whose columns are pairs of a result channel and a tap. A result is the sum of
// columns of neighboring rows (col2im). A CTA computes a tile of all planes of results in a range, and reads one plane
// of inputs after another:
//
//   - The sums over the taps along the depth stay in registers, one set per tap. From one plane of inputs to the next,
//     the set of a tap becomes that of the tap `step` before it: the sets stay where they are, and the operand B begins
//     at another tap. The weights of the taps are therefore stored nearly twice, one after another.
//   - After each plane of inputs, `step` planes of results are complete. Their columns are stored in shared memory.
//     While the tensor cores multiply the next plane, each thread adds up the columns of some results.
//
// Operand A is in registers: a lane copies 16 bytes of channels of an input at a time to shared memory and loads them
// later. These words are the K dimension of two k-steps in an order that differs from that in memory, and the weights
// have the same order.
#include "cuda/conv/direct/few_outputs.cuh"

#include "cuda/conv/common/arithmetic.cuh"

namespace voxgrad::cuda {
namespace {

/// Stores the products of a warp for the planes of results that are complete, as [plane][column][input], and sets their
/// sums to zero. `first_tap` is the tap of the first set of sums. The sets of taps that the kernel does not have are
/// also set to zero, because they may contain products of zero and infinity.
template <int kDepth, int kStep, int kPitch, int kM64, int kAllN8>
__device__ void store_products(Accumulator (&sum)[kM64][kAllN8], int taps, int first_tap, uint32_t products) {
  constexpr int kN8 = kAllN8 / kDepth;
#pragma unroll
  for (int first = 0; first < kDepth; ++first) {
    if (first != first_tap) continue;
    const auto each_sum = [&](int d, const auto& f) {
#pragma unroll
      for (int m = 0; m < kM64; ++m)
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            f(sum[m][(d - first + kDepth) % kDepth * kN8 + n][i], d * 8 * kN8 + n * 8 + i % 2, m * 16 + i / 2 * 8);
    };
#pragma unroll
    for (int d = 0; d < kStep; ++d)
      each_sum(d, [&](float& of_tap, int column, int input) {
        store_shared(products + (column * kPitch + input) * 4, __float_as_uint(of_tap));
        of_tap = 0;
      });
    if (taps == kDepth) continue;
#pragma unroll
    for (int d = kStep; d < kDepth; ++d)
      if (d >= taps) each_sum(d, [](float& of_tap, int, int) { of_tap = 0; });
  }
}

/// Adds up the products of a result. If kExact, there are kLines lines of kTaps taps, otherwise at most that many, or
/// any number if kLines is 0.
template <int kLines, int kTaps, bool kExact>
__device__ float add_products(uint32_t at, uint32_t entry, int next_h, int next_w, float sum) {
  const int lines = static_cast<int>(entry >> 18 & 15), taps = static_cast<int>(entry >> 22 & 15);
#pragma unroll(kLines > 0 ? kLines : 1)
  for (int h = 0; h < (kLines > 0 ? kLines : lines); ++h, at += next_h) {
    float value[kTaps > 0 ? kTaps : 1];
#pragma unroll
    for (int w = 0; w < kTaps; ++w)
      value[w] = kExact || (h < lines && w < taps) ? __uint_as_float(load_shared(at + w * next_w)) : 0;
#pragma unroll
    for (int w = 0; w < kTaps; ++w) sum += value[w];
    if constexpr (kTaps == 0)
      for (int w = 0; w < taps; ++w) sum += __uint_as_float(load_shared(at + w * next_w));
  }
  return sum;
}

/// Adds up the products of each result of a plane and stores the results.
template <class T, int kThreads, int kPitch, int kLines, int kTaps, bool kExact>
__device__ void store_results(const FewOutputsParams& p, const FewOutputsResults& results, T* out, uint32_t products) {
  const int next_w = (p.step[2].value() * kPitch - 1) * 4;
  const int next_h = (p.step[1].value() * p.kernel[2].value() * kPitch - p.inputs[1].value()) * 4;
#pragma unroll(kExact ? 2 : 1)
  for (int i = static_cast<int>(threadIdx.x); i < results.count; i += kThreads) {
    uint32_t entry[2];
    load_shared(results.list + i * kFewOutputsResultBytes, entry);
    if (static_cast<int>(entry[1]) == FewOutputsResults::kOutside) continue;
    const float bias = __uint_as_float(load_shared(results.bias + (entry[0] >> 26) * 4));
    const float sum =
        add_products<kLines, kTaps, kExact>(products + (entry[0] & 0x3ffff), entry[0], next_h, next_w, bias);
    out[static_cast<int>(entry[1])] = T(max_or_nan(sum, p.epilogue.floor));
  }
}

/// Adds up and stores the results of the plane with number `plane`.
template <class T, int kThreads, int kPitch>
__device__ void store_plane(const FewOutputsParams& p, const FewOutputsTile& tile, const FewOutputsResults& results,
                            int plane, uint32_t products) {
  if (static_cast<unsigned>(plane) >= static_cast<unsigned>(p.out_size[0])) return;
  T* const out = static_cast<T*>(p.out) + tile.sample * p.out_stride[0] + plane * p.out_stride[2];
  const auto store = [&]<int kLines, int kTaps, bool kExact>() {
    store_results<T, kThreads, kPitch, kLines, kTaps, kExact>(p, results, out, products);
  };
  switch (p.sums) {
    case FewOutputsSums::two:
      return store.template operator()<2, 2, true>();
    case FewOutputsSums::three:
      return store.template operator()<3, 3, true>();
    case FewOutputsSums::five:
      return store.template operator()<0, 5, true>();
    case FewOutputsSums::up_to_three:
      return store.template operator()<3, 3, false>();
    case FewOutputsSums::any:
      return store.template operator()<0, 0, false>();
  }
}

/// Keeps nvcc from moving accesses to accumulators across this call. Products that run would otherwise be waited for
/// (CUTLASS: warpgroup_fence_operand).
template <int kM64, int kN8>
__device__ void fence_operand(Accumulator (&sum)[kM64][kN8]) {
#pragma unroll
  for (int m = 0; m < kM64; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[m][n][i])::"memory");
}

/// Computes dgrad. Launch: a 2-D grid of CTA tiles by tiles of result channels. Dynamic shared memory: the ring of
/// inputs, the weights, the products of the planes of results that are complete, the list of results, and the bias.
template <class Arithmetic, int kInstance>
__global__ void __launch_bounds__(kFewOutputsInstances[kInstance].threads(), 1)
    few_outputs_dgrad(const __grid_constant__ FewOutputsParams p) {
  wait_for_previous_kernels();
#if VOXGRAD_HAS_WGMMA
  using T = typename Arithmetic::Element;
  constexpr FewOutputsInstance kOf = kFewOutputsInstances[kInstance];
  constexpr int kDepth = kOf.depth, kStep = kOf.step, kN8 = kOf.columns / 8, kThreads = kOf.threads(), kM64 = kOf.m64;
  constexpr int kAllColumns = weight_sets(kDepth) * kOf.columns, kPlaneBytes = kOf.columns * kOf.pitch() * 4;
  extern __shared__ uint4 dynamic_shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t ring = shared_address(dynamic_shared), weights = ring + kOf.stages() * kOf.inputs() * kFewOutputsChunk;
  const uint32_t products = weights + p.chunks * 2 * kAllColumns * 32, list = products + kStep * kPlaneBytes;
  const FewOutputsTile tile(p);
  const int count = p.channels * p.tile[1].value() * p.step[1].value() * p.tile[2].value() * p.step[2].value();
  const FewOutputsResults results{list, list + count * kFewOutputsResultBytes, count};
  FewOutputsInputs<T, kThreads, 2 * kM64, kOf.stages()> inputs(p, tile, ring);
#pragma unroll
  for (int i = 1; i < kOf.stages(); ++i) inputs.copy();
  list_weights<Arithmetic, kThreads, kDepth, kOf.columns>(p, tile.first_channel, weights);
  list_results<T, kThreads>(p, tile, kOf.pitch(), results);
  __syncthreads();
  const uint64_t operand = warp_uniform(weight_operand(weights, kAllColumns));
  const uint32_t products_of_lane = products + (lane % 4 * 2 * kOf.pitch() + warp * kM64 * 16 + lane / 4) * 4;
  const auto store_planes = [&](int q) {  // the results that inputs q complete
#pragma unroll 1
    for (int s = 0; s < kStep; ++s)
      store_plane<T, kThreads, kOf.pitch()>(p, tile, results, q * kStep + s - p.padding[0], products + s * kPlaneBytes);
  };
  Accumulator sum[kM64][kDepth * kN8] = {};
  int first_tap = 0, end = tile.first[0] + tile.count[0];  // first_tap: the tap of the first set of sums
#pragma unroll 1
  for (int q = tile.first[0] - p.reach[0]; q < end; ++q) {
    const uint64_t of_plane = advance_slab(operand, first_tap * kOf.columns);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      uint32_t a[kM64][2][4];
      inputs.load(a);
      fence_operand(sum);
      warpgroup_arrive();
#pragma unroll
      for (int k_step = 0; k_step < 2; ++k_step)
#pragma unroll
        for (int m = 0; m < kM64; ++m)
          multiply_async<T>(sum[m], a[m][k_step], advance_slab(of_plane, (chunk * 2 + k_step) * kAllColumns * 2));
      warpgroup_commit();
      inputs.copy();
      if (chunk + 1 == p.chunks && q > tile.first[0]) store_planes(q - 1);
      warpgroup_wait<0>();
      fence_operand(sum);
    }
    __syncthreads();
    store_products<kDepth, kStep, kOf.pitch()>(sum, p.kernel[0].value(), first_tap, products_of_lane);
    first_tap = first_tap >= kStep ? first_tap - kStep : first_tap - kStep + kDepth;
    __syncthreads();
  }
  cp_async_wait<0>();
  store_planes(end - 1);
#endif
}

FewOutputsSums sums_of(const ConvProblem& p, const FewOutputsPlan& plan) {
  const int h = plan.reach[1] + 1, w = plan.reach[2] + 1;
  const bool exact = p.kernel[1] == h * p.geometry.stride[1] && p.kernel[2] == w * p.geometry.stride[2];
  if (exact && h == 2 && w == 2) return FewOutputsSums::two;
  if (exact && h == 3 && w == 3) return FewOutputsSums::three;
  if (exact && w == 5) return FewOutputsSums::five;
  return h <= 3 && w <= 3 ? FewOutputsSums::up_to_three : FewOutputsSums::any;
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& original, const FewOutputsPlan& plan, const Launch& launch) {
  View in = call.in, w = call.w, out = call.out;
  ConvProblem problem = original;
  if (plan.exchanged) {
    problem = exchange_depth_and_height(original);
    for (View* view : {&in, &w, &out}) std::swap(view->stride[2], view->stride[3]);
  }
  const auto bytes = static_cast<int64_t>(item_size(in.dtype));
  FewOutputsParams p{.in = in.as<char>(),
                     .in_channels = static_cast<int>(problem.in_channels),
                     .weight = w.data,
                     .epilogue = EpilogueParams(call.epilogue),
                     .out = out.data,
                     .out_channels = static_cast<int>(problem.out_channels),
                     .chunks = plan.chunks,
                     .channels = plan.channels,
                     .next_plane = in.stride[2] * bytes - plan.chunks * kFewOutputsChunk,
                     .sums = sums_of(problem, plan)};
  p.in_stride[0] = in.stride[0] * bytes;
  for (int a = 0; a < 3; ++a) {
    p.in_stride[a + 1] = in.stride[a + 2] * bytes;
    p.in_size[a] = static_cast<int>(problem.in_size[a]);
    p.out_size[a] = static_cast<int>(problem.out_size[a]);
    p.kernel[a] = Divisor(problem.kernel[a]);
    p.step[a] = Divisor(problem.geometry.stride[a]);
    p.padding[a] = static_cast<int>(problem.geometry.padding[a]);
    if (a < 2) p.inputs[a] = Divisor(plan.inputs[a]);
    p.reach[a] = plan.reach[a];
    p.first[a] = plan.first[a];
    p.count[a] = plan.count[a];
    p.tile[a] = Divisor(plan.tile[a]);
    p.tiles[a] = Divisor(plan.tiles[a]);
  }
  std::copy_n(w.stride, 5, p.weight_stride);
  std::copy_n(out.stride, 5, p.out_stride);
  const dim3 grid(static_cast<unsigned>(problem.batch * plan.tiles[0] * plan.tiles[1] * plan.tiles[2]),
                  static_cast<unsigned>(plan.channel_tiles));
  static_assert(std::size(kFewOutputsInstances) == 8);
  with_arithmetic(arithmetic_of(problem), [&]<class Arithmetic>() {
    if constexpr (Arithmetic::kParts == 1)
      with_width<0, 1, 2, 3, 4, 5, 6, 7>(plan.instance, [&]<int kInstance>() {
        launch_kernel(call.op, few_outputs_dgrad<Arithmetic, kInstance>, grid,
                      kFewOutputsInstances[kInstance].threads(), plan.shared_bytes, launch.stream, p);
      });
  });
}

}  // namespace voxgrad::cuda
