// Splits float32 tensors into the operands of tf32x3: x = high + low, where high and low are TF32.
#pragma once

#include <array>
#include <optional>

#include "core/view.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_gemm {

/// Returns a copy of a float32 view in the layout of lay_out(). The outermost axis is twice as long: first the high
/// parts, then the low parts. The high part of a value that is not finite is 0, because products with high and low
/// parts would otherwise add infinities of both signs.
View split_copy(const View& view, const std::array<int, 5>& axes, std::optional<Workspace>& memory,
                const Launch& launch);

}  // namespace voxgrad::cuda::implicit_gemm
