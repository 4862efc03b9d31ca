// Random numbers: the streams of core/detail/philox.h. Uniforms have the same bits as on the CPU, normals agree to the
// rounding of log, sin and cos.
#include "core/detail/divide.h"
#include "core/detail/philox.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda::kernel {
namespace {

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

/// A thread draws the elements of one counter: as their lanes are known when it is compiled, the rounds of Philox
/// are carried out once for all of them.
template <class Draw, class T>
__global__ void __launch_bounds__(kBlock) draw(T* out, int64_t count, GeneratorState state) {
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
