// Tensor core products of one warp (mma.sync, sm_80 and newer), in four arithmetics with one interface.
//
// Operands consist of words. A word holds neighboring elements along K: one float or two halves (bf16 or f16). In units
// of words, the fragments of m16n8k8 (TF32) and of m16n8k16 (halves) are the same. With g = lane / 4 and t = lane % 4,
// a lane holds
//
//   A (16 x 8 words): (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)
//   B (8 words x 8):  (t, g) (t + 4, g)
//   C (16 x 8):       (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
//
// A kernel stages words, that is, copies them to shared memory, and is otherwise independent of the arithmetic. An
// arithmetic class defines the elements of a word (kElements elements of type Element), the rounding of a word when it
// is staged, the words into which split() divides a word of B (kParts), and the product of fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/half.h"

namespace voxgrad::cuda {

using Accumulator = float[4];

/// Returns the larger number, or NaN if one of the two is NaN.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Rounds two floats to halves and returns the pair, the first half in the lower bits.
template <class T>
__device__ uint32_t round_pair(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(first), "f"(second));
  else
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(first), "f"(second));
  return pair;
}
/// Rounds two floats like round_pair(first, second). `floor` is the lower bound of both halves: 0 or -infinity. NaN
/// remains NaN.
template <class T>
__device__ uint32_t round_pair(float first, float second, float floor) {
  constexpr bool kBf16 = std::is_same_v<T, BFloat16>;
  const uint32_t bound = floor == 0 ? 0 : kBf16 ? 0xff80ff80 : 0xfc00fc00;
  uint32_t pair = round_pair<T>(first, second);
  if constexpr (kBf16)
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(bound));
  else
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(bound));
  return pair;
}

/// Returns the nearest TF32 value (ties away from zero) as the bits of a float. Tensor cores would truncate the value.
__device__ inline uint32_t round_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

/// Rounds like round_tf32, but leaves the lower 13 bits undefined, which tensor cores ignore. Takes two instructions. A
/// NaN whose only mantissa bits are these 13 bits becomes infinity, but arithmetic does not produce such NaNs.
__device__ inline uint32_t round_for_tensor_cores(float value) {
  uint32_t bits = __float_as_uint(value);
  asm("{ .reg .pred finite; setp.lt.f32 finite, %1, 0f7f800000; @finite add.u32 %0, %0, 0x1000; }"
      : "+r"(bits)
      : "f"(fabsf(value)));
  return bits;
}

/// Adds the product of the fragments of one instruction: m16n8k8 for float, which is multiplied in TF32, or m16n8k16.
template <class T>
__device__ void multiply_fragments(Accumulator& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define VG_MMA(shape, type)                                        \
  asm("mma.sync.aligned." shape ".row.col.f32." type "." type      \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (sizeof(T) == 4)
    VG_MMA("m16n8k8", "tf32");
  else if constexpr (std::is_same_v<T, BFloat16>)
    VG_MMA("m16n8k16", "bf16");
  else
    VG_MMA("m16n8k16", "f16");
#undef VG_MMA
}

/// One product of float32 tensors rounded to TF32, or of halves. TF32 has 10 explicit mantissa bits; NaN and infinities
/// do not change. multiply() takes the staged words of A and the parts of B that split() returns. multiply_words()
/// takes the staged words of both operands.
template <class T>
struct OneProduct {
  static constexpr bool kRounds = sizeof(T) == 4;  // words are rounded when they are staged
  using Element = T;
  static constexpr int kElements = 4 / sizeof(T), kParts = 1;
  __device__ static uint32_t word(const T (&x)[kElements]) {
    if constexpr (kRounds)
      return round_for_tensor_cores(x[0]);
    else
      return x[0].bits | uint32_t{x[1].bits} << 16;
  }
  __device__ static void split(const T (&x)[kElements], uint32_t (&parts)[1]) { parts[0] = word(x); }
  /// Converts staged words to the operand B of multiply().
  template <int kN>
  __device__ static void split_words(uint32_t (&parts)[kN][2], const uint32_t (&b)[kN][2]) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) parts[n][i] = b[n][i];
  }
  template <int kM, int kN>
  __device__ static void multiply(Accumulator (&c)[kM][kN], const uint32_t (&a)[kM][4], const uint32_t (&b)[kN][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_fragments<T>(c[m][n], a[m], b[n][0], b[n][1]);
  }
  template <int kM, int kN>
  __device__ static void multiply_words(Accumulator (&c)[kM][kN], const uint32_t (&a)[kM][4],
                                        const uint32_t (&b)[kN][2]) {
    multiply(c, a, b);
  }
};
using Tf32 = OneProduct<float>;
using Bf16 = OneProduct<BFloat16>;
using F16 = OneProduct<Float16>;

/// float32 tensors with the accuracy of float32. Operands are split into x = high + low in TF32, and three of the four
/// products of the parts are computed. Tensor cores truncate when they add to an accumulator, and the error would grow
/// with each addition. Each call therefore sums its products from zero and adds this sum to the accumulator in float32
/// (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
/// peak performance", 2022). An infinite input gives NaN.
struct Tf32x3 {
  static constexpr bool kRounds = false;
  using Element = float;
  static constexpr int kElements = 1, kParts = 2;
  __device__ static uint32_t word(const float (&x)[1]) { return __float_as_uint(x[0]); }
  __device__ static void split(uint32_t bits, uint32_t& high, uint32_t& low) {
    high = (bits + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  }
  __device__ static void split(const float (&x)[1], uint32_t (&parts)[2]) {
    split(__float_as_uint(x[0]), parts[0], parts[1]);
  }
  /// `b` holds the two words of the high part and then the two words of the low part.
  template <int kM, int kN>
  __device__ static void multiply(Accumulator (&c)[kM][kN], const uint32_t (&a)[kM][4], const uint32_t (&b)[kN][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) split(a[m][i], high[i], low[i]);
      Accumulator step[kN] = {};
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_fragments<float>(step[n], low, b[n][0], b[n][1]);
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_fragments<float>(step[n], high, b[n][2], b[n][3]);
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_fragments<float>(step[n], high, b[n][0], b[n][1]);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] += step[n][i];
    }
  }
  template <int kN>
  __device__ static void split_words(uint32_t (&parts)[kN][4], const uint32_t (&b)[kN][2]) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) split(b[n][i], parts[n][i], parts[n][i + 2]);
  }
  template <int kM, int kN>
  __device__ static void multiply_words(Accumulator (&c)[kM][kN], const uint32_t (&a)[kM][4],
                                        const uint32_t (&b)[kN][2]) {
    uint32_t parts[kN][4];
    split_words(parts, b);
    multiply(c, a, parts);
  }
};

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// Loads a word from a 32-bit address in shared memory. Address arithmetic then takes fewer instructions than with
/// pointers.
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

/// Loads two or four words. The address must be a multiple of their size.
__device__ inline void load_shared(uint32_t address, uint32_t (&word)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(address));
}
__device__ inline void load_shared(uint32_t address, uint32_t (&word)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address));
}

__device__ inline void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ inline void store_shared(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

/// Stores four matrices of 8 x 8 halves, of which each lane holds a pair in the layout of C. Lane 8 * i + r has the
/// address of row r of matrix i, which has 16 bytes.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&word)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_shared(__shfl_sync(0xffffffff, address, 8 * i + lane / 4) + lane % 4 * 4, word[i]);
#endif
}

/// Loads four 8 x 8 matrices of halves, transposed.
__device__ inline void load_transposed(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}

/// Loads an element if `really`; otherwise returns zero. The assembly keeps nvcc from reordering loads, which would
/// need registers for several addresses, and from moving them to the use of their values, so that fewer would run at a
/// time.
template <class T>
__device__ T load_element(const char* at, bool really) {
  if constexpr (sizeof(T) == 4) {
    float x;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
                 : "=f"(x)
                 : "l"(at), "r"(static_cast<unsigned>(really)));
    return x;
  } else {
    T x;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u16 %0, 0; @p ld.global.nc.u16 %0, [%1];}"
                 : "=h"(x.bits)
                 : "l"(at), "r"(static_cast<unsigned>(really)));
    return x;
  }
}

/// Copies 16 bytes from global to shared memory asynchronously if `really`; otherwise writes zeros.
__device__ inline void cp_async(uint32_t shared, const void* global, bool really) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(really ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async(void* shared, const void* global, bool really = true) {
  cp_async(shared_address(shared), global, really);
}
/// Copies 4 bytes asynchronously if `really`; otherwise writes zeros.
__device__ inline void cp_async_word(uint32_t shared, const void* global, bool really) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(really ? 4 : 0)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of the groups that this thread committed are incomplete.
template <int kPending>
__device__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace voxgrad::cuda
