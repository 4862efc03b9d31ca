// Implements the names of dtypes, type promotion and checks of values.
#include "core/dtype.h"

#include <cmath>
#include <iterator>

#include "core/error.h"

namespace voxgrad {

const char* name(DType dtype) {
  constexpr const char* names[] = {"f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(dtype)];
}

DType parse_dtype(const std::string& text) {
  // For each DType: voxgrad's name, PyTorch's name, and PyTorch's second name.
  constexpr const char* names[][3] = {
      {"f32", "float32", "float"}, {"f64", "float64", "double"}, {"bf16", "bfloat16"}, {"f16", "float16", "half"},
      {"i64", "int64", "long"},    {"i32", "int32", "int"},      {"u8", "uint8"},      {"bool"}};
  std::string known;
  for (int dtype = 0; dtype < static_cast<int>(std::size(names)); ++dtype)
    for (const char* name : names[dtype]) {
      if (!name) break;
      if (text == name) return static_cast<DType>(dtype);
      known += (known.empty() ? "" : ", ") + std::string(name);
    }
  fail("dtype", "expected one of ", known, ", got '", text, "'");
}

DType promote_types(DType a, DType b) {
  if (a == b) return a;
  if ((a == bf16 && b == f16) || (a == f16 && b == bf16)) return f32;
  constexpr DType order[] = {b8, u8, i32, i64, bf16, f16, f32, f64};
  const auto place = [&](DType dtype) { return std::find(std::begin(order), std::end(order), dtype); };
  return *std::max(place(a), place(b));
}

void check_fits(const char* op, double value, DType dtype) {
  if (is_floating(dtype) || dtype == b8) return;
  const double end = dtype == i64 ? 0x1p63 : dtype == i32 ? 0x1p31 : 0x1p8;
  const double whole = std::trunc(value), begin = dtype == u8 ? 0 : -end;
  check(whole >= begin && whole < end, op, value, " does not fit ", dtype);
}

void no_kernel(const char* op, const char* device, DType dtype) {
  throw Error(concat(op, " has no ", device, " kernel for ", dtype));
}

}  // namespace voxgrad
