// Random numbers from the streams of core/detail/philox.h. Uniform numbers have the same bits as on the CPU; normal
// numbers differ by the rounding of log, sin and cos.
#include "core/detail/divide.h"
#include "core/detail/philox.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda::kernel {
namespace {

/// Fills `count` contiguous elements. A thread draws all elements of one counter. The loop over these elements (lanes)
/// is unrolled, so that the compiler computes the Philox rounds only once per counter. Launch: one thread per counter
/// in a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T, bool normal>
__global__ void __launch_bounds__(kBlock) draw(T* out, int64_t count, GeneratorState state) {
  wait_for_previous_kernels();
  constexpr int lanes = kUniformsPerCounter<T>;
  for (int64_t i = thread_index(); i * lanes < count; i += thread_count()) {
    const uint64_t counter = state.offset + static_cast<uint64_t>(i);
    T values[lanes];
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane)
      values[lane] =
          normal ? philox_normal<T>(state.seed, counter, lane) : philox_uniform<T>(state.seed, counter, lane);
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane)
      if (i * lanes + lane < count) out[i * lanes + lane] = values[lane];
  }
}

template <bool normal>
void draw_all(const char* op, const View& out, GeneratorState state) {
  const int64_t count = out.numel();
  dispatch_cuda(Floats(), out.dtype, op, [&]<class T>() {
    if (count == 0) return;
    refuse_in_capture(op, out.device, "random numbers, which replays would repeat, cannot be drawn");
    const Launch launch(out);
    constexpr int64_t lanes = kUniformsPerCounter<T>;
    launch_kernel(op, draw<T, normal>, grid_size(divide_up(count, lanes)), kBlock, 0, launch.stream, out.as<T>(), count,
                  state);
  });
}

}  // namespace

void uniform(const View& out, GeneratorState state) { draw_all<false>("uniform", out, state); }
void normal(const View& out, GeneratorState state) { draw_all<true>("normal", out, state); }

}  // namespace voxgrad::cuda::kernel
