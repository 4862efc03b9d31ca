// Helpers for operators and kernels that compute bf16 and f16 ("halves") in float32. Private to voxgrad.
#pragma once

#include <functional>

#include "../../core/tensor.h"

namespace voxgrad {

inline bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

/// Returns f32 for halves, otherwise `dtype`.
inline DType widened(DType dtype) { return is_half(dtype) ? DType::f32 : dtype; }

/// Converts x to float32 if it holds halves; otherwise returns x. The result is differentiable. Operators that are
/// composed of other operators call this function if their intermediate values exceed the range or precision of halves.
inline Tensor widened(const Tensor& x) { return is_half(x.dtype()) ? x.to(f32) : x; }

/// Copies `a`, `b` and `bias` to contiguous float32 tensors, calls `kernel` with these copies and a float32 output, and
/// converts the output to the dtype of `out`. `bias` may be null.
void through_float32(
    const View& out, const View& a, const View& b, const View* bias,
    const std::function<void(const View& out, const View& a, const View& b, const View* bias)>& kernel);

}  // namespace voxgrad
