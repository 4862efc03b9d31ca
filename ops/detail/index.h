// gather() for the implementation of other operators. Private to ops/.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad {

/// Computes gather(). The error for an index out of range names `op`, which must be a string literal.
Tensor gather_as(const char* op, const Tensor& x, int64_t axis, const Tensor& index);

}  // namespace voxgrad
