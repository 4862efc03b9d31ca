// float32 tensors as operands of three products: x = high + low, both TF32.
#pragma once

#include <array>
#include <optional>

#include "core/view.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_gemm {

/// Lays a (., ., D, H, W) view out densely, its axes from the innermost, of which there shall be room for multiples of
/// 16 bytes: sets the strides, and says how many elements that makes.
int64_t lay_out(View& view, const std::array<int, 5>& axes);

/// A copy of a float32 view of any layout, laid out so: the outermost axis is twice as long, of high parts and then of
/// low ones. Of what is not finite the high part is 0: in products with high and low parts, infinities would be of both
/// signs.
View split_copy(const View& view, const std::array<int, 5>& axes, std::optional<Workspace>& memory,
                const Launch& launch);

}  // namespace voxgrad::cuda::implicit_gemm
