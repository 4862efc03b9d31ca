// Helpers for tests that expect operators to reject invalid calls. Each test has a table of calls and expected
// messages.
#pragma once
#include <functional>

#include "ops/create.h"
#include "tests/support.h"

namespace voxgrad {

struct BadCall {
  std::function<void()> call;
  const char* message;  ///< part of the expected error message
};

inline Tensor floats(const Shape& shape) { return zeros(shape); }
inline Tensor integers(const Shape& shape) { return zeros(shape, {.dtype = i64}); }

}  // namespace voxgrad
