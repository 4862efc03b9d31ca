// Activations that can be fused with a normalization.
#pragma once

#include <cstdint>

namespace voxgrad {

/// The activations that other operations can apply to their results (ops/fused.h).
enum class ActivationKind : uint8_t { none, relu, leaky_relu, gelu, silu };

/// An activation with its arguments.
struct ActivationArguments {
  ActivationKind kind = ActivationKind::none;
  double negative_slope = 0.01;  ///< slope of leaky_relu for negative inputs
};

/// The activations around a normalization: y = after(normalize(before(x))).
struct NormActivations {
  ActivationArguments before{}, after{};
  /// Returns true if `before` or `after` is an activation other than none.
  bool any() const { return before.kind != ActivationKind::none || after.kind != ActivationKind::none; }
};

}  // namespace voxgrad
