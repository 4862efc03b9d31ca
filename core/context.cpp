// Implements the settings of a thread that operators read: the guard `autocast`, and the CUDA graph that is captured.
#include "core/autocast.h"
#include "core/capture.h"
#include "core/error.h"

namespace voxgrad {
namespace {
thread_local ScopedValue<std::optional<DType>>* newest = nullptr;
thread_local Capture* current_capture = nullptr;
std::atomic<uint64_t> next_id{1};

std::optional<DType> checked(DType dtype, bool enabled) {
  check(!enabled || dtype == bf16 || dtype == f16, "autocast", "dtype must be bf16 or f16, got ", dtype);
  return enabled ? std::optional(dtype) : std::nullopt;
}
}  // namespace

autocast::autocast(DType dtype, bool enabled) : ScopedValue(newest, checked(dtype, enabled)) {}
std::optional<DType> autocast::dtype() { return newest ? newest->value() : std::nullopt; }

Capture::Capture() noexcept : id_(next_id++) {}
Capture* Capture::current() noexcept { return current_capture; }
Restore<Capture*> Capture::make_current() noexcept { return {current_capture, this}; }

}  // namespace voxgrad
