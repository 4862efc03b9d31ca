// The update of one element for each kind of step in ops/optim.h (SgdStep, AdamStep, ...), for the CPU and CUDA
// kernels. As in PyTorch, constants are computed in double and rounded once to T, which is compute_t of the dtype of
// the parameters. The host computes the constants, unless the number of the iteration depends on a value on the device
// (StepGate::skipped).
#pragma once

#include <array>
#include <cmath>

#include "kernels.h"

namespace voxgrad {

/// The update of an optimizer, constructed from its options. operator() takes the parameter, the gradient and the
/// states of one element, and is overloaded for each possible number of states; states(step) returns the number in use.
template <class Step, class T>
struct StepUpdate;

/// SGD with momentum: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013,
/// except that the learning rate multiplies the whole update, as in PyTorch.
template <class T>
struct StepUpdate<SgdStep, T> {
  T lr;
  T momentum;
  T undamped;  // 1 - dampening
  T weight_decay;
  T sign;  // -1 to maximize
  bool nesterov;
  bool first;  // step 1, which initializes the momentum buffer with the gradient

  static int states(const SgdStep& step) { return step.momentum != 0 ? 1 : 0; }
  VG_HOST_DEVICE explicit StepUpdate(const SgdStep& step)
      : lr(static_cast<T>(step.lr)),
        momentum(static_cast<T>(step.momentum)),
        undamped(static_cast<T>(1 - step.dampening)),
        weight_decay(static_cast<T>(step.weight_decay)),
        sign(step.maximize ? T(-1) : T(1)),
        nesterov(step.nesterov),
        first(step.step == 1) {}

  /// Updates an element without momentum.
  VG_HOST_DEVICE void operator()(T& param, T grad) const { param -= lr * (sign * grad + weight_decay * param); }

  /// Updates an element with momentum.
  VG_HOST_DEVICE void operator()(T& param, T grad, T& buffer) const {
    const T g = sign * grad + weight_decay * param;
    buffer = first ? g : momentum * buffer + undamped * g;
    param -= lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

/// Adam: Kingma and Ba, "Adam", ICLR 2015. With `decoupled`, AdamW: Loshchilov and Hutter, "Decoupled weight decay
/// regularization", ICLR 2019. With `amsgrad`: Reddi et al., "On the convergence of Adam and beyond", ICLR 2018.
template <class T>
struct StepUpdate<AdamStep, T> {
  T rate;          // learning rate divided by the bias correction of exp_avg
  T shrink;        // factor by which decoupled weight decay multiplies the parameter
  T weight_decay;  // 0 if decoupled
  T sign;          // -1 to maximize
  T beta2;
  T rest1;           // 1 - beta1
  T rest2;           // 1 - beta2
  T inv_correction;  // factor that corrects the bias of sqrt(exp_avg_sq)
  T eps;

  static int states(const AdamStep& step) { return step.amsgrad ? 3 : 2; }
  VG_HOST_DEVICE explicit StepUpdate(const AdamStep& step)
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

  /// Updates an element with amsgrad.
  VG_HOST_DEVICE void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq) const {
    const T change = advance(param, grad, exp_avg, exp_avg_sq);
    // If exp_avg_sq is NaN, the maximum becomes NaN too, as with torch.maximum.
    max_exp_avg_sq = exp_avg_sq <= max_exp_avg_sq ? max_exp_avg_sq : exp_avg_sq;
    param -= change / denominator(max_exp_avg_sq);
  }

 private:
  VG_HOST_DEVICE T denominator(T square) const { return std::sqrt(square) * inv_correction + eps; }

  /// Decays the parameter and updates exp_avg and exp_avg_sq. Returns the numerator of the update.
  VG_HOST_DEVICE T advance(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
    const T g = sign * grad + weight_decay * param;
    param *= shrink;
    exp_avg += rest1 * (g - exp_avg);
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * g * g;
    return rate * exp_avg;
  }
};

/// RMSprop: Tieleman and Hinton, "Lecture 6.5 - RMSProp", 2012. With `centered`: Graves, arXiv:1308.0850.
template <class T>
struct StepUpdate<RmspropStep, T> {
  T lr;
  T alpha;
  T rest;  // 1 - alpha
  T eps;
  T weight_decay;
  T momentum;
  T sign;  // -1 to maximize
  bool has_momentum;

  static int states(const RmspropStep& step) { return 1 + (step.momentum != 0) + step.centered; }
  explicit StepUpdate(const RmspropStep& step)
      : lr(static_cast<T>(step.lr)),
        alpha(static_cast<T>(step.alpha)),
        rest(static_cast<T>(1 - step.alpha)),
        eps(static_cast<T>(step.eps)),
        weight_decay(static_cast<T>(step.weight_decay)),
        momentum(static_cast<T>(step.momentum)),
        sign(step.maximize ? T(-1) : T(1)),
        has_momentum(step.momentum != 0) {}

  // The overloads for one, two and three states. `other` is the momentum buffer if has_momentum, otherwise grad_avg.

  VG_HOST_DEVICE void operator()(T& param, T grad, T& square_avg) const {
    apply(param, grad, square_avg, nullptr, nullptr);
  }
  VG_HOST_DEVICE void operator()(T& param, T grad, T& square_avg, T& other) const {
    apply(param, grad, square_avg, has_momentum ? &other : nullptr, has_momentum ? nullptr : &other);
  }
  VG_HOST_DEVICE void operator()(T& param, T grad, T& square_avg, T& momentum_buffer, T& grad_avg) const {
    apply(param, grad, square_avg, &momentum_buffer, &grad_avg);
  }

 private:
  VG_HOST_DEVICE void apply(T& param, T grad, T& square_avg, T* momentum_buffer, T* grad_avg) const {
    const T g = sign * grad + weight_decay * param;
    square_avg = alpha * square_avg + rest * g * g;
    T square = square_avg;
    if (grad_avg) {
      *grad_avg += rest * (g - *grad_avg);
      square -= *grad_avg * *grad_avg;
      if (square < T(0)) square = T(0);  // negative only because of rounding
    }
    T change = g / (std::sqrt(square) + eps);
    if (momentum_buffer) change = *momentum_buffer = momentum * *momentum_buffer + change;
    param -= lr * change;
  }
};

/// Adagrad: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
/// JMLR 2011.
template <class T>
struct StepUpdate<AdagradStep, T> {
  T rate;  // the decayed learning rate
  T weight_decay;
  T eps;
  T sign;  // -1 to maximize

  static int states(const AdagradStep&) { return 1; }
  VG_HOST_DEVICE explicit StepUpdate(const AdagradStep& step)
      : rate(static_cast<T>(step.lr / (1 + static_cast<double>(step.step - 1) * step.lr_decay))),
        weight_decay(static_cast<T>(step.weight_decay)),
        eps(static_cast<T>(step.eps)),
        sign(step.maximize ? T(-1) : T(1)) {}

  VG_HOST_DEVICE void operator()(T& param, T grad, T& sum) const {
    const T g = sign * grad + weight_decay * param;
    sum += g * g;
    param -= rate * g / (std::sqrt(sum) + eps);
  }
};

/// Lion: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.
template <class T>
struct StepUpdate<LionStep, T> {
  T lr;
  T shrink;  // factor by which weight decay multiplies the parameter
  T rest1;   // 1 - beta1
  T rest2;   // 1 - beta2
  T sign;    // -1 to maximize

  static int states(const LionStep&) { return 1; }
  explicit StepUpdate(const LionStep& step)
      : lr(static_cast<T>(step.lr)),
        shrink(static_cast<T>(1 - step.lr * step.weight_decay)),
        rest1(static_cast<T>(1 - step.beta1)),
        rest2(static_cast<T>(1 - step.beta2)),
        sign(step.maximize ? T(-1) : T(1)) {}

  VG_HOST_DEVICE void operator()(T& param, T grad, T& exp_avg) const {
    const T change = sign * grad - exp_avg, direction = exp_avg + rest1 * change;
    // The sign of `direction`; 0 and NaN are kept.
    const T step = direction > T(0) ? T(1) : direction < T(0) ? T(-1) : direction;
    param = shrink * param - lr * step;
    exp_avg += rest2 * change;
  }
};

/// True for updates that do not modify the parameter. Such updates define kReadsOnly.
template <class Update>
inline constexpr bool reads_only = requires {
  Update::kReadsOnly;
};

/// Exponential moving average of the parameter.
template <class T>
struct StepUpdate<EmaStep, T> {
  static constexpr bool kReadsOnly = true;
  T rest;  // 1 - decay

  static int states(const EmaStep&) { return 1; }
  explicit StepUpdate(const EmaStep& step) : rest(static_cast<T>(1 - step.decay)) {}
  VG_HOST_DEVICE void operator()(T& param, T, T& average) const { average += rest * (param - average); }
};

/// Sets *found_inf to 1 if `grad`, the gradient divided by the scale, is not finite. A finite gradient can overflow in
/// this division if the scale is below 1.
template <class T>
struct CheckUpdate {
  static constexpr bool kReadsOnly = true;
  int64_t* found_inf;

  VG_HOST_DEVICE void operator()(T&, T grad) const {
    if (grad - grad == T(0)) return;
#ifdef __CUDA_ARCH__
    *found_inf = 1;
#else
    __atomic_store_n(found_inf, 1, __ATOMIC_RELAXED);
#endif
  }
};
/// Replaces `param`, which holds the gradient, by the gradient divided by the scale, and checks the quotient.
template <class T>
struct UnscaleUpdate {
  CheckUpdate<T> check;

  VG_HOST_DEVICE void operator()(T& param, T grad) const {
    check(param, grad);
    param = grad;
  }
};

template <class T>
struct StepUpdate<ScaleStep, T> {
  const double* factor;

  static int states(const ScaleStep&) { return 0; }
  explicit StepUpdate(const ScaleStep& step) : factor(step.factor) {}
  VG_HOST_DEVICE void operator()(T& param, T) const { param *= static_cast<T>(*factor); }
};

template <class T>
struct StepUpdate<CopyStep, T> {
  T factor;

  static int states(const CopyStep&) { return 0; }
  explicit StepUpdate(const CopyStep& step) : factor(static_cast<T>(step.factor)) {}
  VG_HOST_DEVICE void operator()(T& param, T grad) const { param = factor * grad; }
};

/// Calls run.template operator()<n>(update) with the update of a step, where n is the number of states that the step
/// uses. T is compute_t of the dtype of the parameters.
template <class T, class Step, class F>
void with_update(const Step& step, const F& run) {
  const StepUpdate<Step, T> update(step);
  const auto run_if = [&]<class... State>(State...) {
    if constexpr (requires(T x, State... state) { update(x, x, state...); })
      if (update.states(step) == int{sizeof...(State)}) run.template operator()<sizeof...(State)>(update);
  };
  run_if();
  run_if(T());
  run_if(T(), T());
  run_if(T(), T(), T());
}
template <class T, class F>
void with_update(const UnscaleStep& step, const F& run) {
  const CheckUpdate<T> check{step.found_inf};
  if (step.write)
    run.template operator()<0>(UnscaleUpdate<T>{check});
  else
    run.template operator()<0>(check);
}

/// Returns 1 / *scale, rounded as in PyTorch, or 1 if `scale` is null. Multiplying a gradient by the result undoes the
/// scaling.
VG_HOST_DEVICE inline float inverse_scale(const float* scale) {
  return scale ? static_cast<float>(1 / static_cast<double>(*scale)) : 1.0F;
}

/// Loads one element, applies the update in type C = compute_t<T>, and stores the results.
template <class Update, class T, class C, class... State>
VG_HOST_DEVICE void update_element(const Update& update, C unscale, T& param, const T& grad, State&... state) {
  const auto stored = [&](C p, auto... s) {
    update(p, unscale * convert<C>(grad), s...);
    if constexpr (!reads_only<Update>) param = convert<T>(p);
    ((state = s), ...);
  };
  stored(convert<C>(param), state...);
}

}  // namespace voxgrad
