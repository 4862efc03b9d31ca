// One element's step of each optimizer, once for both devices. Constants are worked out on the host in double,
// as PyTorch does, and rounded to T once. T is compute_t of the parameters.
#pragma once

#include <array>
#include <cmath>

#include "ops/kernels.h"

namespace voxgrad {

/// Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, with
/// PyTorch's placing of the learning rate.
template <class T>
struct SgdUpdate {
  T lr, momentum, undamped, weight_decay, sign;
  bool nesterov, first;

  explicit SgdUpdate(const SgdStep& step)
      : lr(static_cast<T>(step.lr)),
        momentum(static_cast<T>(step.momentum)),
        undamped(static_cast<T>(1 - step.dampening)),
        weight_decay(static_cast<T>(step.weight_decay)),
        sign(step.maximize ? T(-1) : T(1)),
        nesterov(step.nesterov),
        first(step.first) {}

  /// Without momentum.
  VG_HOST_DEVICE void operator()(T& param, T grad) const { param -= lr * (sign * grad + weight_decay * param); }

  VG_HOST_DEVICE void operator()(T& param, T grad, T& buffer) const {
    const T g = sign * grad + weight_decay * param;
    buffer = first ? g : momentum * buffer + undamped * g;
    param -= lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

/// Kingma and Ba, "Adam", ICLR 2015; decoupled: Loshchilov and Hutter, "Decoupled weight decay regularization",
/// ICLR 2019; amsgrad: Reddi et al., "On the convergence of Adam and beyond", ICLR 2018.
template <class T>
struct AdamUpdate {
  T rate, shrink, weight_decay, sign;  // shrink: what decoupled decay leaves of the parameter
  T beta2, rest1, rest2, inv_correction, eps;

  explicit AdamUpdate(const AdamStep& step)
      : rate(static_cast<T>(step.lr / (1 - std::pow(step.beta1, static_cast<double>(step.step))))),
        shrink(static_cast<T>(step.decoupled ? 1 - step.lr * step.weight_decay : 1)),
        weight_decay(static_cast<T>(step.decoupled ? 0 : step.weight_decay)),
        sign(step.maximize ? T(-1) : T(1)),
        beta2(static_cast<T>(step.beta2)),
        rest1(static_cast<T>(1 - step.beta1)),
        rest2(static_cast<T>(1 - step.beta2)),
        inv_correction(static_cast<T>(1 / std::sqrt(1 - std::pow(step.beta2, static_cast<double>(step.step))))),
        eps(static_cast<T>(step.eps)) {}

  VG_HOST_DEVICE void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
    param -= advance(param, grad, exp_avg, exp_avg_sq) / denominator(exp_avg_sq);
  }

  /// amsgrad.
  VG_HOST_DEVICE void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq) const {
    const T change = advance(param, grad, exp_avg, exp_avg_sq);
    // A NaN in exp_avg_sq is taken over, as torch.maximum does.
    max_exp_avg_sq = exp_avg_sq <= max_exp_avg_sq ? max_exp_avg_sq : exp_avg_sq;
    param -= change / denominator(max_exp_avg_sq);
  }

 private:
  VG_HOST_DEVICE T denominator(T square) const { return std::sqrt(square) * inv_correction + eps; }

  /// Decays the parameter, moves both averages on, and returns the step before its division.
  VG_HOST_DEVICE T advance(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
    const T g = sign * grad + weight_decay * param;
    param *= shrink;
    exp_avg += rest1 * (g - exp_avg);
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * g * g;
    return rate * exp_avg;
  }
};

/// Tieleman and Hinton, "Lecture 6.5 - RMSProp", 2012; centered: Graves, arXiv:1308.0850.
template <class T>
struct RmspropUpdate {
  T lr, alpha, rest, eps, weight_decay, momentum, sign;

  explicit RmspropUpdate(const RmspropStep& step)
      : lr(static_cast<T>(step.lr)),
        alpha(static_cast<T>(step.alpha)),
        rest(static_cast<T>(1 - step.alpha)),
        eps(static_cast<T>(step.eps)),
        weight_decay(static_cast<T>(step.weight_decay)),
        momentum(static_cast<T>(step.momentum)),
        sign(step.maximize ? T(-1) : T(1)) {}

  /// `momentum_buffer` and `grad_avg` (centered) may be null.
  VG_HOST_DEVICE void operator()(T& param, T grad, T& square_avg, T* momentum_buffer, T* grad_avg) const {
    const T g = sign * grad + weight_decay * param;
    square_avg = alpha * square_avg + rest * g * g;
    T square = square_avg;
    if (grad_avg) {
      *grad_avg += rest * (g - *grad_avg);
      square -= *grad_avg * *grad_avg;
      if (square < T(0)) square = T(0);  // by rounding only
    }
    const T change = g / (std::sqrt(square) + eps);
    if (momentum_buffer) {
      *momentum_buffer = momentum * *momentum_buffer + change;
      param -= lr * *momentum_buffer;
    } else {
      param -= lr * change;
    }
  }
};

/// RmspropUpdate with the state that there is, in order.
template <class T>
struct RmspropOfState {
  RmspropUpdate<T> update;
  bool has_momentum;

  VG_HOST_DEVICE void operator()(T& param, T grad, T& square) const { update(param, grad, square, nullptr, nullptr); }
  VG_HOST_DEVICE void operator()(T& param, T grad, T& square, T& other) const {
    update(param, grad, square, has_momentum ? &other : nullptr, has_momentum ? nullptr : &other);
  }
  VG_HOST_DEVICE void operator()(T& param, T grad, T& square, T& momentum, T& average) const {
    update(param, grad, square, &momentum, &average);
  }
};

/// Calls run(update, which of StepViews::state are its own, in order) for each optimizer; T is compute_t.
template <class T, class F>
void with_update(const SgdStep& step, const F& run) {
  const SgdUpdate<T> update(step);
  if (step.momentum != 0)
    run(update, std::array{0});
  else
    run(update, std::array<int, 0>{});
}
template <class T, class F>
void with_update(const AdamStep& step, const F& run) {
  const AdamUpdate<T> update(step);
  if (step.amsgrad)
    run(update, std::array{0, 1, 2});
  else
    run(update, std::array{0, 1});
}
template <class T, class F>
void with_update(const RmspropStep& step, const F& run) {
  const bool momentum = step.momentum != 0;
  const RmspropOfState<T> update{RmspropUpdate<T>(step), momentum};
  if (momentum && step.centered)
    run(update, std::array{0, 1, 2});
  else if (momentum || step.centered)
    run(update, std::array{0, momentum ? 1 : 2});
  else
    run(update, std::array{0});
}

/// One element: parameter and state are loaded, updated in compute_t<T> and stored.
template <class Update, class T, class... State>
VG_HOST_DEVICE void update_element(const Update& update, T& param, const T& grad, State&... state) {
  using C = compute_t<T>;
  const auto stored = [&](C p, auto... s) {
    update(p, convert<C>(grad), s...);
    param = convert<T>(p);
    ((state = convert<T>(s)), ...);
  };
  stored(convert<C>(param), convert<C>(state)...);
}

}  // namespace voxgrad
