// Formulas of the activations around a normalization, for the CPU and CUDA kernels. Private to voxgrad.
#pragma once

#include "../activation.h"
#include "scalar_ops.h"

namespace voxgrad {

// ---- single activations: value(x) applies the activation; gradient(g, x) returns the gradient of x, where g is the
// gradient of value(x)

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

/// Returns f.operator()<op, gradient>(), where `op` is the operator of an activation and `gradient` the operator of its
/// gradient. Returns `none` for ActivationKind::none.
template <class Result, class F>
VG_HOST_DEVICE Result with_operators(ActivationKind kind, const Result& none, const F& f) {
  switch (kind) {
    case ActivationKind::relu:
      return f.template operator()<UnaryOp::relu, BinaryOp::relu_grad>();
    case ActivationKind::leaky_relu:
      return f.template operator()<UnaryOp::leaky_relu, BinaryOp::leaky_relu_grad>();
    case ActivationKind::gelu:
      return f.template operator()<UnaryOp::gelu, BinaryOp::gelu_grad>();
    case ActivationKind::silu:
      return f.template operator()<UnaryOp::silu, BinaryOp::silu_grad>();
    case ActivationKind::none:
      break;
  }
  return none;
}

/// Any activation. Each call selects the activation at run time.
struct AnyActivation {
  ActivationArguments a;

  explicit AnyActivation(const ActivationArguments& given) : a(given) {}
  template <class T>
  VG_HOST_DEVICE T value(T x) const {
    const T slope = static_cast<T>(a.negative_slope);
    return with_operators(a.kind, x, [=]<UnaryOp op, BinaryOp>() { return apply<op>(x, slope, T(0)); });
  }
  template <class T>
  VG_HOST_DEVICE T gradient(T g, T x) const {
    const T slope = static_cast<T>(a.negative_slope);
    return with_operators(a.kind, g, [=]<UnaryOp, BinaryOp op>() { return apply<op>(g, x, slope, T(0)); });
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

/// Calls f with the fastest ActivationPair that computes `a` for elements of type T.
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
