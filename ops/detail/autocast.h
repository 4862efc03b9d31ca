// Conversion of operands under autocast (core/autocast.h). Private to ops/.
#pragma once

#include "../../core/tensor.h"

namespace voxgrad {

/// Converts x to the dtype that ops/autocast.cpp lists for `op`. The result is differentiable. Returns x if autocast is
/// disabled, if `op` is not listed, or if x is undefined, f64 or not floating.
Tensor autocasted(const char* op, const Tensor& x);

/// Returns the dtype of the result of a loss whose kernel reads bf16 and f16 directly. Under autocast, the result is
/// f32, or f64 if the input is f64. Without autocast, the result has the dtype of the input.
DType autocasted_result(const Tensor& input);

}  // namespace voxgrad
