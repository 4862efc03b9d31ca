// Storage types for bfloat16 and IEEE binary16. The types convert to float for arithmetic, and from float by rounding
// to the nearest value, ties to even. In device code, a conversion from float is a single instruction, which converts
// every NaN to the same NaN.
#pragma once

#include <bit>
#include <cstdint>

/// Marks functions that nvcc compiles for the host and for the GPU. Other compilers ignore the mark.
#ifdef __CUDACC__
#define VG_HOST_DEVICE __host__ __device__
#else
#define VG_HOST_DEVICE
#endif

namespace voxgrad {

/// The element type of bf16 tensors: sign, 8 bits of exponent and 7 bits of mantissa.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  VG_HOST_DEVICE explicit BFloat16(float value) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t x = std::bit_cast<uint32_t>(value);
    const bool nan = (x & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = x + 0x7fffu + ((x >> 16) & 1u);
    bits = static_cast<uint16_t>(nan ? (x >> 16) | 0x40u : rounded >> 16);
#endif
  }
  VG_HOST_DEVICE operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

/// The element type of f16 tensors, IEEE binary16: sign, 5 bits of exponent and 10 bits of mantissa. Numbers of at
/// least 65520 become infinite.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  VG_HOST_DEVICE explicit Float16(float value) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t x = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (x >> 16) & 0x8000u;
    const uint32_t magnitude = x & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      half = 0x7c00u;                       // rounds to infinity
    } else if (magnitude >= 0x38800000u) {  // normal: rebias the exponent, round to even
      const uint32_t odd = (magnitude >> 13) & 1u;
      half = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    } else {  // subnormal: adding 0.5 makes the float addition round at 2^-24
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      half = std::bit_cast<uint32_t>(shifted) - 0x3f000000u;
    }
    bits = static_cast<uint16_t>(sign | half);
#endif
  }
  VG_HOST_DEVICE operator float() const {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
    return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
#endif
  }
};

}  // namespace voxgrad
