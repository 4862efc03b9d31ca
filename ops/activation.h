// Activations that are computed together with a normalisation.
#pragma once

#include <cstdint>

namespace voxgrad {

enum class ActivationKind : uint8_t { none, relu, leaky_relu, gelu, silu };

/// An activation with its arguments.
struct ActivationArguments {
  ActivationKind kind = ActivationKind::none;
  double negative_slope = 0.01;  ///< of leaky_relu
};

/// y = after(normalised(before(x))).
struct NormActivations {
  ActivationArguments before{}, after{};
  bool any() const { return before.kind != ActivationKind::none || after.kind != ActivationKind::none; }
};

}  // namespace voxgrad
