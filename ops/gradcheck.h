// Checks of gradients against central differences.
#pragma once

#include <functional>
#include <string>

#include "../core/tensor.h"

namespace voxgrad {

/// Options of gradcheck and gradgradcheck.
struct GradcheckOptions {
  double eps = 1e-6;   ///< the function is evaluated at x - eps and x + eps
  double atol = 1e-5;  ///< absolute tolerance
  double rtol = 1e-3;  ///< tolerance relative to the numeric derivative
  /// Number of random directions. If 0, checks the derivatives of a random linear combination of all outputs with
  /// respect to each element of each input. If k > 0, checks the derivatives of this combination along k random
  /// directions over all inputs, which is faster for large inputs.
  int projections = 0;
  /// If true, derivatives at kinks are skipped and counted. The check assumes a kink where the one-sided differences
  /// disagree. If false, these derivatives are compared, too.
  bool skip_kinks = true;
  uint64_t seed = 0;
};

/// The result of gradcheck and gradgradcheck. Converts to `passed`.
struct GradcheckReport {
  bool passed = true;
  int64_t checked = 0;   ///< number of derivatives that were compared
  int64_t kinks = 0;     ///< number of derivatives that were skipped because of a kink
  double max_error = 0;  ///< largest |analytic - numeric|
  std::string message;   ///< describes the largest failure: input, index, analytic and numeric value
  explicit operator bool() const { return passed; }
};

/// Compares the gradients of `function` with central differences for every input that requires grad. Throws Error if a
/// floating-point input is not f64, if no input requires grad, or if an output changes between two identical calls.
GradcheckReport gradcheck(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs,
                          const GradcheckOptions& options = {});
/// Checks second derivatives: applies gradcheck to the gradients of `function` as functions of the inputs and of random
/// grad_outputs. Also fails if the gradients with create_graph differ from the gradients without create_graph.
GradcheckReport gradgradcheck(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs,
                              const GradcheckOptions& options = {});

}  // namespace voxgrad
