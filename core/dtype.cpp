#include "core/dtype.h"

#include "core/error.h"

namespace voxgrad {

const char* name(DType dtype) {
  constexpr const char* names[] = {"f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(dtype)];
}

void no_kernel(const char* op, const char* device, DType dtype) {
  throw Error(concat(op, " has no ", device, " kernel for ", dtype));
}

}  // namespace voxgrad
