// What operators do under autocast (core/autocast.h). Private to ops/.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad {

/// x as `op` takes it: converted, differentiably, to the dtype of the operator's row in ops/autocast.cpp; x itself
/// without a guard or a row, and if x is undefined, f64 or not floating.
Tensor autocasted(const char* op, const Tensor& x);

/// The dtype of a loss whose kernel reads halves as they are: f32 under autocast, else the input's.
DType autocasted_result(const Tensor& input);

}  // namespace voxgrad
