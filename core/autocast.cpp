// Implements the guard `autocast`, which selects the dtype in which operators compute.
#include "core/autocast.h"

#include "core/error.h"

namespace voxgrad {
namespace {
thread_local ScopedValue<std::optional<DType>>* newest = nullptr;

std::optional<DType> checked(DType dtype, bool enabled) {
  check(!enabled || dtype == bf16 || dtype == f16, "autocast", "dtype must be bf16 or f16, got ", dtype);
  return enabled ? std::optional(dtype) : std::nullopt;
}
}  // namespace

autocast::autocast(DType dtype, bool enabled) : ScopedValue(newest, checked(dtype, enabled)) {}
std::optional<DType> autocast::dtype() { return newest ? newest->value() : std::nullopt; }

}  // namespace voxgrad
