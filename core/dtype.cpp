#include "core/dtype.h"

#include <cmath>

#include "core/error.h"

namespace voxgrad {

const char* name(DType dtype) {
  constexpr const char* names[] = {"f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(dtype)];
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
