// The terms that one voxel adds to the sums of the kernel class_sums (ops/detail/kernels.def), and the gradient with
// respect to the logits of the voxel. Used by the CPU and CUDA kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

#ifdef __CUDA_ARCH__
#define VG_UNROLL _Pragma("unroll")
#else
#define VG_UNROLL
#endif

namespace voxgrad {

/// Returns the class index at position l of sample n.
VG_HOST_DEVICE inline int64_t class_at(const View& target, int64_t n, int64_t l) {
  const int64_t i = n * target.stride[0] + l * target.stride[1];
  if (target.dtype == i64) return static_cast<const int64_t*>(target.data)[i];
  if (target.dtype == i32) return static_cast<const int32_t*>(target.data)[i];
  return static_cast<const uint8_t*>(target.data)[i];
}

/// The values of one voxel for `classes` <= kClasses classes. kClasses is a constant, so that a GPU keeps the arrays in
/// registers.
template <class C, int kClasses>
struct ClassVoxel {
  int classes;
  C p[kClasses];               // the logits or probabilities, later replaced by probabilities or gradients
  C minus_log[kClasses] = {};  // -log(p), set by take_softmax

  /// Calls f(c) for each class c.
  template <class F>
  VG_HOST_DEVICE void each(F f) const {
    VG_UNROLL
    for (int c = 0; c < kClasses; ++c)
      if (c < classes) f(c);
  }
  /// Loads the logits or probabilities x[0], x[step], ...
  template <class T>
  VG_HOST_DEVICE void load(const T* x, int64_t step) {
    each([&](int c) { p[c] = convert<C>(x[c * step]); });
  }
  /// Stores the gradients to x[0], x[step], ...
  template <class T>
  VG_HOST_DEVICE void store(T* x, int64_t step) const {
    each([&](int c) { x[c * step] = convert<T>(p[c]); });
  }
  /// Replaces the logits by probabilities.
  VG_HOST_DEVICE void take_softmax() {
    C top = -std::numeric_limits<C>::infinity(), total = 0;  // NaN does not change the maximum, but makes the total NaN
    each([&](int c) { top = p[c] > top ? p[c] : top; });
    each([&](int c) {
      minus_log[c] = top - p[c];
      p[c] = std::exp(p[c] - top);
      total += p[c];
    });
    const C factor = 1 / total, log_total = std::log(total);
    each([&](int c) {
      p[c] *= factor;
      minus_log[c] += log_total;
    });
  }
  /// Adds the terms of the loaded voxel to the sums. The target of the voxel is class `own`. sums[c] has the five sums
  /// of class c in the order of kernels.def.
  template <class Sum>
  VG_HOST_DEVICE void add_to(Sum (&sums)[kClasses][kClassSums], int64_t own, const ClassSums& options) {
    if (options.softmax) take_softmax();
    each([&](int c) {
      sums[c][0] += static_cast<Sum>(options.squared ? p[c] * p[c] : p[c]);
      sums[c][4] += static_cast<Sum>(minus_log[c]);
      if (c != own) return;
      sums[c][1] += static_cast<Sum>(p[c]);
      sums[c][2] += 1;
      sums[c][3] += static_cast<Sum>(minus_log[c]);
    });
  }
  /// Replaces the loaded values by their gradients. `grad` (C, 5) is the gradient with respect to the sums; `own` is
  /// the class of the target.
  VG_HOST_DEVICE void differentiate(const C* grad, int64_t own, const ClassSums& options) {
    // Returns the part of the gradient with respect to p[c] that comes from the sums of p and t * p, where t is 1 for
    // the class of the target and 0 for other classes. The sums of the logarithms are differentiated below, with
    // respect to the logits.
    const auto p_grad = [&](int c) {
      const C* sums_grad = grad + c * kClassSums;
      return sums_grad[0] * (options.squared ? 2 * p[c] : C(1)) + (c == own ? sums_grad[1] : C(0));
    };
    if (!options.softmax) return each([&](int c) { p[c] = p_grad(c); });
    take_softmax();
    // The derivative of -log(p[k]) with respect to logit c is p[c] - 1 if c is k, otherwise p[c]. This
    // derivative and the derivative of the softmax both contribute terms p[c] * x to the gradient of logit c, where x
    // does not depend on c. `common` is the sum of the factors x.
    C common = grad[own * kClassSums + 3];
    each([&](int c) { common += grad[c * kClassSums + 4] - p[c] * p_grad(c); });
    each([&](int c) {
      const C* sums_grad = grad + c * kClassSums;
      p[c] = p[c] * (p_grad(c) + common) - sums_grad[4] - (c == own ? sums_grad[3] : C(0));
    });
  }
};

/// Calls f.template operator()<k>() with the smallest k of 2, 4, 8 and kMaxClasses that is at least `classes`.
template <class F>
void with_classes(int64_t classes, const F& f) {
  if (classes <= 2) return f.template operator()<2>();
  if (classes <= 4) return f.template operator()<4>();
  if (classes <= 8) return f.template operator()<8>();
  f.template operator()<kMaxClasses>();
}

/// Returns a view of the partial sums at `data`. The shape is that of `sums`, (N, C, 5) or (1, C, 5), with an
/// additional axis of size `rows` after the first axis. The caller adds the elements of the view
/// along this axis to obtain `sums`.
inline View sums_of_parts(const View& sums, void* data, int64_t rows) {
  View parts = sums;
  parts.rank = 4;
  const int64_t size[] = {sums.size[0], rows, sums.size[1], sums.size[2]};
  std::copy_n(size, 4, parts.size);
  return dense_like(parts, data, f64);
}

}  // namespace voxgrad
