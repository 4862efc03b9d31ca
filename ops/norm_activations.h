// The formulas of the activations around a normalisation, for the kernels of both devices. Each class has before(x),
// after(u), and the gradients that go back through them: through_before(g, x), through_after(g, u). Private to voxgrad.
#pragma once

#include "ops/activation.h"
#include "ops/scalar_ops.h"

namespace voxgrad {

struct NoActivations {
  explicit NoActivations(const NormActivations&) {}
  template <class T>
  VG_HOST_DEVICE T before(T x) const {
    return x;
  }
  template <class T>
  VG_HOST_DEVICE T after(T u) const {
    return u;
  }
  template <class T>
  VG_HOST_DEVICE T through_before(T g, T) const {
    return g;
  }
  template <class T>
  VG_HOST_DEVICE T through_after(T g, T) const {
    return g;
  }
};

/// relu or leaky_relu, in float.
struct Piecewise {
  float slope;
  bool relu;

  explicit Piecewise(const ActivationArguments& a)
      : slope(static_cast<float>(a.negative_slope)), relu(a.kind == ActivationKind::relu) {}
  template <class T>
  VG_HOST_DEVICE T value(T x) const {
    return x < T(0) ? (relu ? T(0) : T(slope) * x) : x;
  }
  template <class T>
  VG_HOST_DEVICE T gradient(T g, T x) const {
    return x > T(0) ? g : !relu ? T(slope) * g : x <= T(0) ? T(0) : g;
  }
};

struct PiecewiseBefore : NoActivations {
  Piecewise function;

  explicit PiecewiseBefore(const NormActivations& a) : NoActivations(a), function(a.before) {}
  template <class T>
  VG_HOST_DEVICE T before(T x) const {
    return function.value(x);
  }
  template <class T>
  VG_HOST_DEVICE T through_before(T g, T x) const {
    return function.gradient(g, x);
  }
};

struct PiecewiseAfter : NoActivations {
  Piecewise function;

  explicit PiecewiseAfter(const NormActivations& a) : NoActivations(a), function(a.after) {}
  template <class T>
  VG_HOST_DEVICE T after(T u) const {
    return function.value(u);
  }
  template <class T>
  VG_HOST_DEVICE T through_after(T g, T u) const {
    return function.gradient(g, u);
  }
};

template <class T>
VG_HOST_DEVICE T activation_value(const ActivationArguments& a, T x) {
  switch (a.kind) {
    case ActivationKind::relu:
      return apply<UnaryOp::relu>(x, T(0), T(0));
    case ActivationKind::leaky_relu:
      return apply<UnaryOp::leaky_relu>(x, static_cast<T>(a.negative_slope), T(0));
    case ActivationKind::gelu:
      return apply<UnaryOp::gelu>(x, T(0), T(0));
    case ActivationKind::silu:
      return apply<UnaryOp::silu>(x, T(0), T(0));
    case ActivationKind::none:
      break;
  }
  return x;
}
template <class T>
VG_HOST_DEVICE T activation_gradient(const ActivationArguments& a, T g, T x) {
  switch (a.kind) {
    case ActivationKind::relu:
      return apply<BinaryOp::relu_grad>(g, x, T(0), T(0));
    case ActivationKind::leaky_relu:
      return apply<BinaryOp::leaky_relu_grad>(g, x, static_cast<T>(a.negative_slope), T(0));
    case ActivationKind::gelu:
      return apply<BinaryOp::gelu_grad>(g, x, T(0), T(0));
    case ActivationKind::silu:
      return apply<BinaryOp::silu_grad>(g, x, T(0), T(0));
    case ActivationKind::none:
      break;
  }
  return g;
}

/// Any, chosen for every element.
struct AnyActivations {
  NormActivations a;

  explicit AnyActivations(const NormActivations& given) : a(given) {}
  template <class T>
  VG_HOST_DEVICE T before(T x) const {
    return activation_value(a.before, x);
  }
  template <class T>
  VG_HOST_DEVICE T after(T u) const {
    return activation_value(a.after, u);
  }
  template <class T>
  VG_HOST_DEVICE T through_before(T g, T x) const {
    return activation_gradient(a.before, g, x);
  }
  template <class T>
  VG_HOST_DEVICE T through_after(T g, T u) const {
    return activation_gradient(a.after, g, u);
  }
};

/// Calls f(activations) with the quickest class for them, for elements of type T.
template <class T, class F>
void with_activations(const NormActivations& a, F&& f) {
  const auto piecewise = [](const ActivationArguments& one) {
    return one.kind == ActivationKind::relu || one.kind == ActivationKind::leaky_relu;
  };
  if (!a.any()) return f(NoActivations(a));
  if constexpr (sizeof(T) < 8) {
    if (piecewise(a.before) && a.after.kind == ActivationKind::none) return f(PiecewiseBefore(a));
    if (piecewise(a.after) && a.before.kind == ActivationKind::none) return f(PiecewiseAfter(a));
  }
  f(AnyActivations(a));
}

}  // namespace voxgrad
