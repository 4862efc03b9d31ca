// Code that the kernels of 1x1x1 convolutions between a tensor with many channels (wide) and a tensor with few channels
// (narrow) share: parameters, weights in shared memory, and sums.
#pragma once

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/pointwise.h"
#include "cuda/detail/divisor.h"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {

/// The parameters of fprop and dgrad. Strides are in elements.
struct PointwiseParams {
  const void* in;
  const void* weight;
  EpilogueParams epilogue;
  void* out;
  int64_t weight_narrow;  // stride of the weights along the narrow channels
  int64_t weight_wide;    // stride of the weights along the wide channels
  int64_t voxels;         // of all samples, or of one sample if the tensors are contiguous
  Divisor narrow;         // number of narrow channels
  int wide;               // number of wide channels

  PointwiseParams(const ConvCall& call, const PointwisePlan& plan, int64_t voxels_)
      : in(call.in.data),
        weight(call.w.data),
        epilogue(call.epilogue),
        out(call.out.data),
        voxels(voxels_),
        narrow(plan.narrow),
        wide(plan.wide) {
    const int in_axis = call.pass == ConvPass::dgrad ? 0 : 1, wide_axis = plan.wide_in ? in_axis : 1 - in_axis;
    weight_narrow = call.w.stride[1 - wide_axis];
    weight_wide = call.w.stride[wide_axis];
  }
};

/// Launches the kernels for contiguous tensors (pointwise_planes.cu).
void run_planes(const ConvCall& call, const ConvProblem& problem, const PointwisePlan& plan, const Launch& launch);

/// The position of a thread: its warp and lane, its voxels (row), and its share of the channels (part).
struct PointwiseLane {
  int warp = static_cast<int>(threadIdx.x) / 32;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int row = lane / kPointwiseLanes;
  int part = lane % kPointwiseLanes;
};

/// Stores 16 bytes with one instruction. For a plain assignment, nvcc would emit four.
template <class T>
__device__ void store_words(T* to, const Vector<T, kVectorWidth<T>>& vector) {
  __stwb(reinterpret_cast<uint4*>(to), std::bit_cast<uint4>(vector));
}

/// Copies the weights to shared memory as `count` words of operand B. channels(i, e) returns the narrow and the wide
/// channel of element e of word i. Weights of missing channels are zero.
template <class Arithmetic, class Channels>
__device__ void list_weights(const PointwiseParams& p, int count, uint32_t* to, const Channels& channels) {
  using T = typename Arithmetic::Element;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    T value[Arithmetic::kElements];
#pragma unroll
    for (int e = 0; e < Arithmetic::kElements; ++e) {
      const int2 channel = channels(i, e);
      value[e] = T(0.0f);
      if (channel.x < p.narrow.value() && channel.y < p.wide)
        value[e] = static_cast<const T*>(p.weight)[channel.x * p.weight_narrow + channel.y * p.weight_wide];
    }
    to[i] = Arithmetic::word(value);
  }
}

/// Sums of products. float32 is multiplied like in Tf32x3, but the tensor cores add the two small products, `rest`,
/// over all calls. They are NaN if an input is infinite, and are then omitted.
template <class Arithmetic, int kM, int kN>
struct Sums {
  static constexpr bool kSplit = Arithmetic::kParts > 1;
  Accumulator sum[kM][kN] = {};
  Accumulator rest[kSplit ? kM : 1][kSplit ? kN : 1] = {};

  /// Splits a word like Tf32x3, except that a finite number does not become infinite, and NaN not finite.
  __device__ static void split(uint32_t bits, uint32_t& high, uint32_t& low) {
    high = bits;
    asm("{ .reg .pred rounds; setp.lt.f32 rounds, %1, 0f7f7ff000; @rounds add.u32 %0, %0, 0x1000; }"
        : "+r"(high)
        : "f"(fabsf(__uint_as_float(bits))));
    high &= 0xffffe000;
    low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  }
  /// Adds the products of staged words.
  __device__ void multiply(const uint32_t (&a)[kM][4], const uint32_t (&b)[kN][2]) {
    if constexpr (kSplit) {
      uint32_t high[4], low[4], parts[kN][4];
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) split(b[i / 2][i % 2], parts[i / 2][i % 2], parts[i / 2][i % 2 + 2]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split(a[m][i], high[i], low[i]);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          Accumulator product = {};
          multiply_fragments<float>(product, high, parts[n][0], parts[n][1]);
          multiply_fragments<float>(rest[m][n], low, parts[n][0], parts[n][1]);
          multiply_fragments<float>(rest[m][n], high, parts[n][2], parts[n][3]);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[m][n][i] += product[i];
        }
      }
    } else {
      Arithmetic::multiply_words(sum, a, b);
    }
  }
  __device__ float total(int m, int n, int i) const {
    if constexpr (kSplit) return sum[m][n][i] + (fabsf(sum[m][n][i]) < INFINITY ? rest[m][n][i] : 0);
    return sum[m][n][i];
  }
};

}  // namespace voxgrad::cuda
