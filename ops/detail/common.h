// The headers and helpers that most operators need: autograd, argument checks, conversions and kernels. Private to
// ops/.
#pragma once

#include "../../core/autograd.h"
#include "../../core/communicator.h"
#include "../create.h"
#include "../elementwise.h"
#include "../reduce.h"
#include "../shape.h"
#include "checks.h"
#include "halves.h"
#include "kernels.h"
#include "volume.h"

namespace voxgrad {

/// Converts x to the dtype that ops/autocast.cpp lists for `op`. The result is differentiable. Returns x if autocast is
/// disabled, if `op` is not listed, or if x is undefined, f64 or not floating.
Tensor autocasted(const char* op, const Tensor& x);

/// Returns the dtype of the result of a loss whose kernel reads bf16 and f16 directly. Under autocast, the result is
/// f32, or f64 if the input is f64. Without autocast, the result has the dtype of the input.
DType autocasted_result(const Tensor& input);

/// Computes gather(). The error for an index out of range names `op`, which must be a string literal.
Tensor gather_as(const char* op, const Tensor& x, int64_t axis, const Tensor& index);

// ---- ranks that share a volume, of which each rank has a slab: consecutive planes along D (ops/spatial.h)

/// Returns the sum of t over the ranks of `group`, on every rank. The result is differentiable any number of times.
Tensor sum_over_ranks(const Tensor& t, distributed::Communicator& group);

/// Returns the ranks that share the volume of a tensor with `axes` axes, or null if this rank has the whole tensor.
/// Only tensors (N, C, D, H, W) are shared.
inline distributed::Communicator* sharing_ranks(int64_t axes) {
  return axes == 5 ? distributed::spatial_group() : nullptr;
}

/// Throws Error if ranks share volumes and an operator reads across the boundary of a slab. `within` is true if the
/// operator reads only elements of the slab.
inline void check_within_slab(const char* op, bool within) {
  check(within || !distributed::spatial_group(), op,
        "reads across the boundary of a slab along D, which is not supported while ranks share a volume "
        "(SpatialParallel)");
}

}  // namespace voxgrad
