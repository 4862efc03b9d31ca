// The update of one element for each kind of step in ops/optim.h (SgdStep, AdamStep, ...), for the CPU and CUDA
// kernels. As in PyTorch, constants are computed in double and rounded once to T, which is compute_t of the dtype of
// the parameters. The host computes the constants, unless the number of the iteration depends on a value on the device
// (StepGate::skipped).
#pragma once

#include <cmath>

#include "kernels.h"

namespace voxgrad {

/// The update of an optimizer, an aggregate that is initialized with its options. operator() takes the parameter, the
/// gradient and the states of one element, and is overloaded for each possible number of states; states() returns the
/// number in use.
template <class Step, class T>
struct StepUpdate;

/// SGD with momentum: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013,
/// except that the learning rate multiplies the whole update, as in PyTorch.
template <class T>
struct StepUpdate<SgdStep, T> {
  SgdStep options;
  T lr = static_cast<T>(options.lr);
  T momentum = static_cast<T>(options.momentum);
  T undamped = static_cast<T>(1 - options.dampening);
  T weight_decay = static_cast<T>(options.weight_decay);
  T sign = options.maximize ? T(-1) : T(1);
  bool nesterov = options.nesterov;
  bool first = options.step == 1;  // step 1 initializes the momentum buffer with the gradient

  int states() const { return options.momentum != 0 ? 1 : 0; }

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
  AdamStep options;
  double steps = static_cast<double>(options.step);
  /// The learning rate divided by the bias correction of exp_avg.
  T rate = static_cast<T>(options.lr / (1 - std::pow(options.beta1, steps)));
  /// The factor by which decoupled weight decay multiplies the parameter.
  T shrink = static_cast<T>(options.decoupled ? 1 - options.lr * options.weight_decay : 1);
  T weight_decay = static_cast<T>(options.decoupled ? 0 : options.weight_decay);
  T sign = options.maximize ? T(-1) : T(1);
  T beta2 = static_cast<T>(options.beta2);
  T rest1 = static_cast<T>(1 - options.beta1);
  T rest2 = static_cast<T>(1 - options.beta2);
  /// The factor that corrects the bias of sqrt(exp_avg_sq).
  T inv_correction = static_cast<T>(1 / std::sqrt(1 - std::pow(options.beta2, steps)));
  T eps = static_cast<T>(options.eps);

  int states() const { return options.amsgrad ? 3 : 2; }

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
  RmspropStep options;
  T lr = static_cast<T>(options.lr);
  T alpha = static_cast<T>(options.alpha);
  T rest = static_cast<T>(1 - options.alpha);
  T eps = static_cast<T>(options.eps);
  T weight_decay = static_cast<T>(options.weight_decay);
  T momentum = static_cast<T>(options.momentum);
  T sign = options.maximize ? T(-1) : T(1);
  bool has_momentum = options.momentum != 0;

  int states() const { return 1 + has_momentum + options.centered; }

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
  AdagradStep options;
  T rate = static_cast<T>(options.lr / (1 + static_cast<double>(options.step - 1) * options.lr_decay));
  T weight_decay = static_cast<T>(options.weight_decay);
  T eps = static_cast<T>(options.eps);
  T sign = options.maximize ? T(-1) : T(1);

  int states() const { return 1; }
  VG_HOST_DEVICE void operator()(T& param, T grad, T& sum) const {
    const T g = sign * grad + weight_decay * param;
    sum += g * g;
    param -= rate * g / (std::sqrt(sum) + eps);
  }
};

/// Lion: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.
template <class T>
struct StepUpdate<LionStep, T> {
  LionStep options;
  T lr = static_cast<T>(options.lr);
  /// The factor by which weight decay multiplies the parameter.
  T shrink = static_cast<T>(1 - options.lr * options.weight_decay);
  T rest1 = static_cast<T>(1 - options.beta1);
  T rest2 = static_cast<T>(1 - options.beta2);
  T sign = options.maximize ? T(-1) : T(1);

  int states() const { return 1; }
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
  EmaStep options;
  T rest = static_cast<T>(1 - options.decay);

  int states() const { return 1; }
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
  ScaleStep options;

  int states() const { return 0; }
  VG_HOST_DEVICE void operator()(T& param, T) const { param *= static_cast<T>(*options.factor); }
};

template <class T>
struct StepUpdate<CopyStep, T> {
  CopyStep options;
  T factor = static_cast<T>(options.factor);

  int states() const { return 0; }
  VG_HOST_DEVICE void operator()(T& param, T grad) const { param = factor * grad; }
};

/// Calls run.template operator()<n>(update) with the update of a step, where n is the number of states that the step
/// uses. T is compute_t of the dtype of the parameters.
template <class T, class Step, class F>
void with_update(const Step& step, const F& run) {
  const StepUpdate<Step, T> update{step};
  const auto run_if = [&]<class... State>(State...) {
    if constexpr (requires(T x, State... state) { update(x, x, state...); })
      if (update.states() == int{sizeof...(State)}) run.template operator()<sizeof...(State)>(update);
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
