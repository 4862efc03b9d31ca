// Picking by index on behalf of another operator. Private to ops/.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad {

/// gather(), in which an index out of range is an error of `op`, a string literal.
Tensor gather_as(const char* op, const Tensor& x, int64_t axis, const Tensor& index);

}  // namespace voxgrad
