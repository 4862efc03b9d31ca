// bf16 and f16 where something computes in float32 only. Private to voxgrad.
#pragma once

#include <functional>

#include "../../core/tensor.h"

namespace voxgrad {

inline bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

/// f32 for halves, else `dtype`.
inline DType widened(DType dtype) { return is_half(dtype) ? DType::f32 : dtype; }

/// x in float32 if it is of halves, differentiably: for compositions whose intermediates a half would not hold.
Tensor widened(const Tensor& x);

/// Calls `kernel` with contiguous float32 copies of its operands, halves on one device, and rounds what it writes,
/// once, into `out`. `bias` may be null.
void through_float32(
    const View& out, const View& a, const View& b, const View* bias,
    const std::function<void(const View& out, const View& a, const View& b, const View* bias)>& kernel);

}  // namespace voxgrad
