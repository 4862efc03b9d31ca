// Gradients checked against central differences.
#pragma once

#include <functional>
#include <string>

#include "../core/tensor.h"

namespace voxgrad {

struct GradcheckOptions {
  double eps = 1e-6;  ///< half the step of the difference
  double atol = 1e-5;
  double rtol = 1e-3;
  /// 0: every element of every input. k > 0: k random directions through all inputs at once, for large ones.
  int projections = 0;
  /// Elements at which the function looks kinked (one-sided differences disagree) are left out and counted,
  /// if true; else they count as they are.
  bool skip_kinks = true;
  uint64_t seed = 0;
};

struct GradcheckReport {
  bool passed = true;
  int64_t checked = 0;   ///< derivatives compared
  int64_t kinks = 0;     ///< left out because of a kink
  double max_error = 0;  ///< largest |analytic - numeric|
  std::string message;   ///< the worst failure: input, index, output, analytic and numeric value
  explicit operator bool() const { return passed; }
};

/// Compares the gradients of `function` with central differences, for every input that requires grad.
/// Inputs must be f64. Throws for other dtypes, for none that requires grad, and for an output that
/// changes between two identical calls.
GradcheckReport gradcheck(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs,
                          const GradcheckOptions& options = {});
/// gradcheck of the gradients themselves, in the inputs and in random grad_outputs. Also finds a gradient that
/// depends on whether it is recorded (create_graph).
GradcheckReport gradgradcheck(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs,
                              const GradcheckOptions& options = {});

}  // namespace voxgrad
