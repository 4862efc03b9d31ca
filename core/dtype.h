// Element types, and the dispatch from a run-time dtype to a compile-time type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <type_traits>

#include "core/half.h"

namespace voxgrad {

enum class DType : uint8_t { f32, f64, bf16, f16, i64, i32, u8, b8 };
using enum DType;  // voxgrad::f32, ...

/// "f32", "i64", "bool", ...
const char* name(DType dtype);
inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name(dtype); }

/// Bytes of one element.
constexpr int64_t item_size(DType dtype) {
  constexpr int64_t sizes[] = {4, 8, 2, 2, 8, 4, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::f16; }

/// The DType of a C++ type: dtype_of<float> == f32.
template <class T>
inline constexpr DType dtype_of = [] {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return DType::bf16;
  else if constexpr (std::is_same_v<T, Float16>)
    return DType::f16;
  else if constexpr (std::is_same_v<T, bool>)
    return DType::b8;
  else if constexpr (std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) == 8)
    return DType::i64;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::i32;
  else if constexpr (std::is_same_v<T, uint8_t>)
    return DType::u8;
  else
    static_assert(sizeof(T) == 0, "no voxgrad dtype for this type");
}();

/// Throws "<op>: <value> does not fit <dtype>" for NaN and for what lies outside an integer dtype's range once its
/// fraction is cut off. Floating dtypes and bool take any value.
void check_fits(const char* op, double value, DType dtype);

/// Throws "<op> has no <device> kernel for <dtype>".
[[noreturn]] void no_kernel(const char* op, const char* device, DType dtype);

/// Calls f.template operator()<T>() with T the C++ type of `dtype`, if it is among Ts; else no_kernel().
template <class... Ts, class F>
void dispatch(DType dtype, const char* op, const char* device, F&& f) {
  const bool found = ((dtype == dtype_of<Ts> && (f.template operator()<Ts>(), true)) || ...);
  if (!found) no_kernel(op, device, dtype);
}

}  // namespace voxgrad
