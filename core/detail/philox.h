// Philox4x32-10, a counter-based random number generator that returns the same integers on every device.
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cmath>
#include <cstdint>

#include "../dtype.h"

namespace voxgrad {

/// Four random 32-bit words.
struct Philox4 {
  uint32_t v[4];
};

/// Returns four random words. The key of the generator is `seed`; its 128-bit counter is (`stream`, `counter`).
VG_HOST_DEVICE inline Philox4 philox(uint64_t seed, uint64_t counter, uint64_t stream = 0) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Hashes (seed, epoch, index): returns a seed for sample `index` of an epoch, or for the order of an epoch.
inline uint64_t derived_seed(uint64_t seed, int64_t epoch, int64_t index) {
  const Philox4 r = philox(seed, static_cast<uint64_t>(index), static_cast<uint64_t>(epoch));
  return static_cast<uint64_t>(r.v[0]) << 32 | r.v[1];
}

/// Returns a uniform number in [0, 1) with 24 random bits.
VG_HOST_DEVICE inline float uniform_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }
/// Returns a uniform number in [0, 1) with 53 random bits.
VG_HOST_DEVICE inline double uniform_double(uint32_t high, uint32_t low) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

/// The number of uniform numbers per counter value: four floats or two doubles. Numbers of type bf16 and f16 are
/// rounded floats.
template <class T>
inline constexpr uint64_t kUniformsPerCounter = 16 / sizeof(compute_t<T>);

/// Returns number `j` of the kUniformsPerCounter<T> uniform numbers that `r` yields.
template <class T>
VG_HOST_DEVICE T uniform_of(const Philox4& r, uint64_t j) {
  if constexpr (sizeof(T) == 8)
    return j ? uniform_double(r.v[2], r.v[3]) : uniform_double(r.v[0], r.v[1]);
  else
    return uniform_float(r.v[j]);
}

/// Rounds the uniform number `u` to T. Returns the largest T below 1 if `u` would round to 1.
template <class T>
VG_HOST_DEVICE T rounded_uniform(compute_t<T> u) {
  constexpr compute_t<T> kMaxBelowOne = std::is_same_v<T, Float16> ? 1 - 0x1p-11f : 1 - 0x1p-8f;
  if constexpr (std::is_same_v<T, compute_t<T>>)
    return u;
  else
    return T(u < kMaxBelowOne ? u : kMaxBelowOne);
}

/// Converts two uniform numbers to a pair of standard normal numbers (Box and Muller 1958). Returns the first or the
/// second number of the pair.
template <class T>
VG_HOST_DEVICE T normal_of(T u, T v, bool second) {
  // 1 - u lies in (0, 1], where the logarithm is finite.
  const T radius = std::sqrt(T(-2) * std::log(T(1) - u));
  const T angle = T(6.283185307179586476925286766559) * v;
  return radius * (second ? std::sin(angle) : std::cos(angle));
}

/// Returns element `i` of the stream of uniform numbers in [0, 1) that starts at the counter value `offset`.
template <class T>
VG_HOST_DEVICE T philox_uniform(uint64_t seed, uint64_t offset, uint64_t i) {
  constexpr uint64_t n = kUniformsPerCounter<T>;
  return rounded_uniform<T>(uniform_of<compute_t<T>>(philox(seed, offset + i / n), i % n));
}

/// Returns element `i` of the stream of standard normal numbers that starts at the counter value `offset`.
template <class T>
VG_HOST_DEVICE T philox_normal(uint64_t seed, uint64_t offset, uint64_t i) {
  const uint64_t pair = i & ~uint64_t{1};
  const auto uniform = [=](uint64_t k) { return philox_uniform<compute_t<T>>(seed, offset, k); };
  return convert<T>(normal_of(uniform(pair), uniform(pair + 1), i % 2 != 0));
}

}  // namespace voxgrad
