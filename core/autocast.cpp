#include "core/autocast.h"

#include <memory>

#include "core/detail/context.h"
#include "core/error.h"

namespace voxgrad {
namespace {
thread_local ScopedValue<std::optional<DType>>* newest = nullptr;

std::optional<DType> checked(DType dtype, bool enabled) {
  check(!enabled || dtype == bf16 || dtype == f16, "autocast", "dtype must be bf16 or f16, got ", dtype);
  return enabled ? std::optional(dtype) : std::nullopt;
}

[[maybe_unused]] const bool registered = Context::add({
    .capture = []() -> std::function<Context::Guard()> {
      return [dtype = autocast::dtype()] { return std::make_shared<autocast>(dtype.value_or(f32), dtype.has_value()); };
    },
    .reset = []() -> Context::Guard { return std::make_shared<autocast>(f32, false); },
});
}  // namespace

autocast::autocast(DType dtype, bool enabled) : dtype_(newest, checked(dtype, enabled)) {}
std::optional<DType> autocast::dtype() { return newest ? newest->value() : std::nullopt; }

}  // namespace voxgrad
