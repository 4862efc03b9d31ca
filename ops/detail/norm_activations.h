// Formulas of the activations around a normalization, for the CPU and CUDA kernels. Private to voxgrad.
#pragma once

#include "../activation.h"
#include "scalar_ops.h"

namespace voxgrad {

// ---- one activation: value(x), and gradient(g, x) from the gradient g of the value

struct NoActivation {
  explicit NoActivation(const ActivationArguments&) {}
  template <class T>
  VG_HOST_DEVICE T value(T x) const {
    return x;
  }
  template <class T>
  VG_HOST_DEVICE T gradient(T g, T) const {
    return g;
  }
};

/// relu or leaky_relu with a float slope. The code has no branches, because a branch on the sign of an element is hard
/// to predict.
struct Piecewise {
  float slope;
  bool relu;

  explicit Piecewise(const ActivationArguments& a)
      : slope(static_cast<float>(a.negative_slope)), relu(a.kind == ActivationKind::relu) {}
  template <class T>
  VG_HOST_DEVICE T value(T x) const {
    const T below = relu ? T(0) : T(slope) * x;
    return x < T(0) ? below : x;
  }
  template <class T>
  VG_HOST_DEVICE T gradient(T g, T x) const {
    const T below = relu ? T(0) : T(slope) * g;
    const bool is_above = (x > T(0)) | (relu & (x != x));
    return is_above ? g : below;
  }
};

/// Any activation, selected at run time for each element.
struct AnyActivation {
  ActivationArguments a;

  explicit AnyActivation(const ActivationArguments& given) : a(given) {}
  template <class T>
  VG_HOST_DEVICE T value(T x) const {
    const T slope = static_cast<T>(a.negative_slope), zero(0);
    switch (a.kind) {
      case ActivationKind::relu:
        return apply<UnaryOp::relu>(x, zero, zero);
      case ActivationKind::leaky_relu:
        return apply<UnaryOp::leaky_relu>(x, slope, zero);
      case ActivationKind::gelu:
        return apply<UnaryOp::gelu>(x, zero, zero);
      case ActivationKind::silu:
        return apply<UnaryOp::silu>(x, zero, zero);
      case ActivationKind::none:
        break;
    }
    return x;
  }
  template <class T>
  VG_HOST_DEVICE T gradient(T g, T x) const {
    const T slope = static_cast<T>(a.negative_slope), zero(0);
    switch (a.kind) {
      case ActivationKind::relu:
        return apply<BinaryOp::relu_grad>(g, x, zero, zero);
      case ActivationKind::leaky_relu:
        return apply<BinaryOp::leaky_relu_grad>(g, x, slope, zero);
      case ActivationKind::gelu:
        return apply<BinaryOp::gelu_grad>(g, x, zero, zero);
      case ActivationKind::silu:
        return apply<BinaryOp::silu_grad>(g, x, zero, zero);
      case ActivationKind::none:
        break;
    }
    return g;
  }
};

// ---- the two activations around a normalization

template <class Before, class After>
struct ActivationPair {
  Before before;
  After after;

  explicit ActivationPair(const NormActivations& a) : before(a.before), after(a.after) {}
};
using NoActivations = ActivationPair<NoActivation, NoActivation>;
using AnyActivations = ActivationPair<AnyActivation, AnyActivation>;

/// Calls f(activations) with the fastest ActivationPair for the activations and elements of type T.
template <class T, class F>
void with_activations(const NormActivations& a, F&& f) {
  const auto is_piecewise = [](const ActivationArguments& activation) {
    return activation.kind == ActivationKind::relu || activation.kind == ActivationKind::leaky_relu;
  };
  if (!a.any()) return f(NoActivations(a));
  if constexpr (sizeof(T) < 8) {
    if (is_piecewise(a.before) && a.after.kind == ActivationKind::none)
      return f(ActivationPair<Piecewise, NoActivation>(a));
    if (is_piecewise(a.after) && a.before.kind == ActivationKind::none)
      return f(ActivationPair<NoActivation, Piecewise>(a));
  }
  f(AnyActivations(a));
}

}  // namespace voxgrad
