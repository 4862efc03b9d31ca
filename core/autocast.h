// Mixed precision: selects the dtype in which operators compute.
#pragma once

#include <optional>

#include "dtype.h"
#include "scoped_value.h"

namespace voxgrad {

/// During its lifetime, converts the floating-point operands of the operators that this thread calls, as torch.autocast
/// does. Put `vg::autocast guard(vg::bf16);` around the forward pass and the loss.
///
/// The table in ops/autocast.cpp selects the dtype: `dtype` (bf16 or f16) for convolutions and matrix products; f32 for
/// losses and other operators for which the range or precision of bf16 and f16 is too small. All other operators
/// compute in the dtypes of their operands. f64 operands are never converted. Guards nest; a guard with `enabled =
/// false` switches the conversions off. Backward passes compute in the dtypes of the forward pass.
///
/// Parameters and their gradients stay f32. The converted copy of a leaf that requires grad is stored with the leaf and
/// reused until the leaf is written, so a parameter is converted once per step. Writes through a pointer that
/// mutable_data() returned before the conversion are not detected; call mutable_data() again before such a write.
///
/// Throws Error if `dtype` is neither bf16 nor f16 and `enabled` is true.
class [[nodiscard]] autocast : ScopedValue<std::optional<DType>> {
 public:
  [[nodiscard]] explicit autocast(DType dtype, bool enabled = true);

  /// Returns the dtype of the newest guard of this thread; returns nullopt if there is no guard or if the guard is not
  /// enabled.
  static std::optional<DType> dtype();
};

}  // namespace voxgrad
