#include "core/autocast.h"
#include "core/error.h"

namespace voxgrad {
namespace {
thread_local std::optional<DType> current;
}  // namespace

autocast::autocast(DType dtype, bool enabled) : previous_(current) {
  check(!enabled || dtype == bf16 || dtype == f16, "autocast", "dtype must be bf16 or f16, got ", dtype);
  current = enabled ? std::optional(dtype) : std::nullopt;
}
autocast::~autocast() { current = previous_; }
std::optional<DType> autocast::dtype() { return current; }

}  // namespace voxgrad
