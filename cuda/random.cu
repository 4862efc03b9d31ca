// Random numbers from the streams of core/detail/philox.h. Uniform numbers have the same bits as on the CPU; normal
// numbers differ by the rounding of log, sin and cos.
#include <concepts>

#include "core/detail/divide.h"
#include "core/detail/philox.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda::kernel {
namespace {

/// A distribution. element() returns the random number at (counter, lane) of the stream with the given seed.
template <class Draw, class T>
concept Distribution = requires(uint64_t seed, uint64_t counter, uint64_t lane) {
  { Draw::template element<T>(seed, counter, lane) } -> std::same_as<T>;
};

struct UniformDraw {
  template <class T>
  __device__ static T element(uint64_t seed, uint64_t counter, uint64_t lane) {
    return philox_uniform<T>(seed, counter, lane);
  }
};

struct NormalDraw {
  template <class T>
  __device__ static T element(uint64_t seed, uint64_t counter, uint64_t lane) {
    return philox_normal<T>(seed, counter, lane);
  }
};

/// Fills `count` contiguous elements. A thread draws all elements of one counter. The lanes are compile-time constants,
/// so that the Philox rounds are computed only once per counter. Launch: one thread per counter in a 1-D
/// grid of any size, kBlock threads per CTA. No shared memory.
template <class Draw, class T>
requires Distribution<Draw, T> __global__ void __launch_bounds__(kBlock)
    draw(T* out, int64_t count, GeneratorState state) {
  constexpr int lanes = kUniformsPerCounter<T>;
  for (int64_t i = thread_index(); i * lanes < count; i += thread_count()) {
    const uint64_t counter = state.offset + static_cast<uint64_t>(i);
    T values[lanes];
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) values[lane] = Draw::template element<T>(state.seed, counter, lane);
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane)
      if (i * lanes + lane < count) out[i * lanes + lane] = values[lane];
  }
}

template <class Draw>
void draw_all(const char* op, const View& out, GeneratorState state) {
  const int64_t count = out.numel();
  dispatch_cuda(Floats(), out.dtype, op, [&]<class T>() {
    if (count == 0) return;
    refuse_in_capture(op, out.device, "random numbers, which replays would repeat, cannot be drawn");
    const Launch launch(out);
    constexpr int64_t lanes = kUniformsPerCounter<T>;
    draw<Draw><<<grid_size(divide_up(count, lanes)), kBlock, 0, launch.stream>>>(out.as<T>(), count, state);
    check_launch(op);
  });
}

}  // namespace

void uniform(const View& out, GeneratorState state) { draw_all<UniformDraw>("uniform", out, state); }
void normal(const View& out, GeneratorState state) { draw_all<NormalDraw>("normal", out, state); }

}  // namespace voxgrad::cuda::kernel
