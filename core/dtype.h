// Element types, and the dispatch from a run-time dtype to a compile-time type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <type_traits>

#include "half.h"

namespace voxgrad {

/// The type of the elements of a tensor: floats of 32 and 64 bits, bfloat16, IEEE binary16, signed integers of 64 and
/// 32 bits, unsigned integers of 8 bits, and bool (b8, one byte).
enum class DType : uint8_t { f32, f64, bf16, f16, i64, i32, u8, b8 };
using enum DType;  // voxgrad::f32, ...

/// Returns "f32", "i64", "bool", ...
const char* name(DType dtype);
/// Returns the dtype with the given name: voxgrad's ("bf16") or PyTorch's ("bfloat16", "float32", "float", ...). Throws
/// Error for any other text; the message lists the valid names.
DType parse_dtype(const std::string& text);
/// Prints name(dtype).
inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name(dtype); }

/// Returns the bytes of one element.
constexpr int64_t item_size(DType dtype) {
  constexpr int64_t sizes[] = {4, 8, 2, 2, 8, 4, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

/// Returns true for f32, f64, bf16 and f16.
constexpr bool is_floating(DType dtype) { return dtype <= DType::f16; }

/// Returns the smallest dtype that both dtypes convert to, as torch.promote_types does. The order is bool, integers,
/// floats. A mix of bf16 and f16 promotes to f32.
DType promote_types(DType a, DType b);

/// The DType of a C++ type: dtype_of<float> == f32.
template <class T>
inline constexpr DType dtype_of = [] {
  constexpr bool is_type[] = {std::is_same_v<T, float>,
                              std::is_same_v<T, double>,
                              std::is_same_v<T, BFloat16>,
                              std::is_same_v<T, Float16>,
                              std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) == 8,
                              std::is_same_v<T, int32_t>,
                              std::is_same_v<T, uint8_t>,
                              std::is_same_v<T, bool>};  // in the order of DType
  constexpr auto found = std::ranges::find(is_type, true) - is_type;
  static_assert(found < 8, "no voxgrad dtype for this type");
  return static_cast<DType>(found);
}();

/// The type in which kernels compute with elements of type T. For BFloat16 and Float16, the type is float, and kernels
/// round each result once.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>, float, T>;

/// A list of C++ types for dispatch(), such as the dtypes that a kernel supports.
template <class... Ts>
struct Types {};
using WideFloats = Types<float, double>;  // types in which kernels compute without conversion
using Floats = Types<float, double, BFloat16, Float16>;
using Numbers = Types<float, double, BFloat16, Float16, int64_t, int32_t, uint8_t>;
using Anything = Types<float, double, BFloat16, Float16, int64_t, int32_t, uint8_t, bool>;

/// Returns whether a list contains the C++ type of `dtype`.
template <class... Ts>
constexpr bool has(Types<Ts...>, DType dtype) {
  return ((dtype == dtype_of<Ts>) || ...);
}

/// Converts an element as Tensor::to() does, in the same way on all devices. From float to integer: the fraction is
/// dropped, values outside the range saturate, and NaN becomes 0. From integer to integer: the low bits are kept. To
/// bool: x != 0.
template <class To, class From>
VG_HOST_DEVICE To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_class_v<From>) {  // BFloat16 or Float16
    return convert<To>(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (std::is_class_v<To>) {
    return To(static_cast<float>(x));
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    using Limits = std::numeric_limits<To>;
    constexpr To kMin = Limits::min(), kMax = Limits::max();
    constexpr From kEnd = From(2) * static_cast<From>(kMax / 2 + 1);  // kMax + 1, which is exact
    if (x != x) return To(0);
    if (x < static_cast<From>(kMin)) return kMin;
    return x < kEnd ? static_cast<To>(x) : kMax;
  } else {
    return static_cast<To>(x);
  }
}

/// Throws "<op>: <value> does not fit <dtype>" if `dtype` is an integer dtype and `value` is NaN or outside its range
/// after the fraction is dropped. Accepts any value for floating-point dtypes and bool.
void check_fits(const char* op, double value, DType dtype);

/// Throws "<op> has no <device> kernel for <dtype>".
[[noreturn]] void no_kernel(const char* op, const char* device, DType dtype);

/// Calls `f.template operator()<T>()`, where T is the C++ type of `dtype`. Calls no_kernel() if the list lacks T.
template <class... Ts, class F>
void dispatch(Types<Ts...>, DType dtype, const char* op, const char* device, F&& f) {
  const bool found = ((dtype == dtype_of<Ts> && (f.template operator()<Ts>(), true)) || ...);
  if (!found) no_kernel(op, device, dtype);
}

}  // namespace voxgrad
