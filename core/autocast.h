// Mixed precision: which dtype operators compute in.
#pragma once

#include <optional>

#include "dtype.h"
#include "scoped_value.h"

namespace voxgrad {

/// While it lives, operators that this thread calls convert their floating operands, f64 apart, by the table in
/// ops/autocast.cpp: convolutions and matrix products to `dtype` (bf16 or f16), losses and what a half's range or
/// precision would spoil to f32; everything else computes in the dtypes that it is given. As torch.autocast, on all
/// devices: `vg::autocast guard(vg::bf16);` around the forward pass and the loss. Guards nest, and `enabled = false`
/// switches the conversions off inside another. Backward passes compute in the dtypes of the forward pass, without the
/// table.
///
/// Parameters stay f32, and their gradients are f32. What a leaf that requires grad is converted to is kept with it
/// until its elements are written, so that it is converted once a step, however often it is used. A write through a
/// pointer that mutable_data() gave earlier does not count: ask for the pointer anew, as for backward passes.
///
/// Throws Error if `dtype` is neither bf16 nor f16 and `enabled` is true.
class [[nodiscard]] autocast {
 public:
  [[nodiscard]] explicit autocast(DType dtype, bool enabled = true);

  /// Returns the dtype of the newest guard of this thread; nothing if there is no guard or if it is not enabled.
  static std::optional<DType> dtype();

 private:
  ScopedValue<std::optional<DType>> dtype_;
};

}  // namespace voxgrad
