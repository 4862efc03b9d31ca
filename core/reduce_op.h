// The operations that reduce many elements to one.
#pragma once

#include <cstdint>

namespace voxgrad {

/// Operation of a reduction over axes (ops/reduce.h) or over ranks (core/communicator.h). Reductions over ranks do not
/// support mean.
enum class ReduceOp : uint8_t { sum, max, min, mean };

}  // namespace voxgrad
