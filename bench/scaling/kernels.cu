// Implements the kernel that simulates a reduction, and gpu_name().
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "bench/scaling/kernels.h"
#include "core/error.h"

namespace scaling {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // loads of 16 bytes that each thread has in flight
// Shared memory per CTA, about as much as NCCL uses. A convolution kernel that uses all the shared memory of an SM
// cannot run on an SM that runs such a CTA.
constexpr int kSharedBytes = 64 * 1024;

void check_cuda(cudaError_t code) { voxgrad::check(code == cudaSuccess, "scaling", cudaGetErrorString(code)); }

__device__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

template <class T>
struct alignas(16) Wide {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

/// Multiplies `count` groups of 16 bytes by `factor`. Each thread has kInFlight loads in flight, so that a few CTAs can
/// saturate the memory bandwidth.
template <class T>
__device__ void scale(Wide<T>* groups, int64_t count, float factor) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < count; first += kInFlight * stride) {
    Wide<T> loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * stride < count) loaded[i] = groups[first + i * stride];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * stride >= count) continue;
      for (T& value : loaded[i].values) value = T(float(value) * factor);
      groups[first + i * stride] = loaded[i];
    }
  }
}

/// Imitates the reduction of a collective: multiplies `count` values by `factor` and runs for at least `time` ns. Does
/// not change the last values if they do not fill a group of 16 bytes. The grid may have any size. Each CTA has
/// kThreads threads.
template <class T>
__global__ void __launch_bounds__(kThreads) reduce(T* values, int64_t count, float factor, uint64_t time) {
  const uint64_t begin = nanoseconds();
  scale(reinterpret_cast<Wide<T>*>(values), count / Wide<T>::kCount, factor);
  __syncthreads();
  if (threadIdx.x == 0)
    while (nanoseconds() - begin < time) continue;
  __syncthreads();
}

template <class T>
void launch(void* values, int64_t count, float factor, uint64_t time, int blocks, cudaStream_t stream) {
  check_cuda(cudaFuncSetAttribute(reduce<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  reduce<T><<<blocks, kThreads, kSharedBytes, stream>>>(static_cast<T*>(values), count, factor, time);
  check_cuda(cudaGetLastError());
}

}  // namespace

void queue_reduction(const voxgrad::Tensor& tensor, float factor, double microseconds, int blocks,
                     const voxgrad::cuda::Stream& stream) {
  check_cuda(cudaSetDevice(stream.device()));
  const auto handle = static_cast<cudaStream_t>(stream.handle());
  const auto time = static_cast<uint64_t>(microseconds * 1e3);
  const bool half = tensor.dtype() == voxgrad::bf16;
  const int64_t count = factor != 1 && (half || tensor.dtype() == voxgrad::f32) ? tensor.numel() : 0;
  void* values = tensor.mutable_raw_data();
  half ? launch<__nv_bfloat16>(values, count, factor, time, blocks, handle)
       : launch<float>(values, count, factor, time, blocks, handle);
}

std::string gpu_name(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

}  // namespace scaling
