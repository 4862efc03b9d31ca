// Checks of gradients against central differences.
//
// The check combines all elements of all outputs linearly, with random weights, into one number: the projection. One
// backward pass computes the gradient of the projection. Check::compare() compares the derivative along one direction
// with the differences of the projection after small steps forward and backward. By default, each direction is one
// element of an input. With GradcheckOptions::projections, each direction is a random vector over all inputs.
// gradgradcheck applies the same check to the function that computes the gradients.
#include "ops/gradcheck.h"

#include <cmath>
#include <sstream>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

using Function = std::function<Tensors(const Tensors&)>;

/// Converts the row-major position `flat` in `shape` to an index.
Dims unravel(int64_t flat, const Shape& shape) {
  Dims index = shape;
  for (int64_t axis = shape.size() - 1; axis >= 0; --axis) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  return index;
}

/// Returns the tensors that are defined and have a floating-point dtype.
Tensors floating(const Tensors& tensors) {
  Tensors kept;
  for (const Tensor& t : tensors)
    if (t.defined() && is_floating(t.dtype())) kept.push_back(t);
  return kept;
}

/// Returns the indices of the inputs that require grad. Throws if there are none.
std::vector<size_t> active_inputs(const char* op, const Tensors& inputs) {
  std::vector<size_t> active;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && inputs[i].requires_grad()) active.push_back(i);
  check(!active.empty(), op, "none of the inputs requires grad");
  return active;
}

/// Draws an f64 tensor with the shape and device of `like`.
Tensor draw(const Tensor& like, Generator& generator) {
  return randn(like.shape(), {.dtype = f64}, &generator).to(like.device());
}

/// Returns grad(), with zeros for inputs on which no output depends.
Tensors defined_grad(const Tensors& outputs, const Tensors& inputs, const Tensors& grad_outputs, bool create_graph) {
  Tensors grads(inputs.size());
  if (!outputs.empty()) grads = autograd::grad(outputs, inputs, grad_outputs, false, create_graph, true);
  for (size_t i = 0; i < grads.size(); ++i)
    if (!grads[i].defined()) grads[i] = zeros(inputs[i].shape(), inputs[i].options());
  return grads;
}

/// One run of gradcheck. The inputs from index `count` on are grad_outputs.
class Check {
 public:
  Check(const char* op, const Function& function, const Tensors& inputs, const GradcheckOptions& options, size_t count)
      : op_(op), function_(function), options_(options), count_(count) {
    check(static_cast<bool>(function), op, "the function is empty");
    check(std::isfinite(options.eps) && options.eps > 0, op, "eps must be finite and positive, got ", options.eps);
    check(options.atol >= 0 && options.rtol >= 0, op, "tolerances must not be negative, got atol ", options.atol,
          " and rtol ", options.rtol);
    check(options.projections >= 0, op, "projections must not be negative, got ", options.projections);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& input = inputs[i];
      check(!input.defined() || !is_floating(input.dtype()) || input.dtype() == f64, op, name(i), " must be f64, got ",
            describe(input));
      inputs_.push_back(input.defined() ? input.detach().clone().requires_grad_(input.requires_grad()) : input);
    }
    active_ = active_inputs(op, inputs);
  }

  GradcheckReport run() {
    Generator generator(options_.seed);
    Tensors inputs, outputs;
    {
      const GradModeGuard recording(true);
      outputs = floating(function_(inputs_));
      check(!outputs.empty(), op_, "the function returned no floating-point tensor");
      for (size_t k = 0; k < outputs.size(); ++k) {
        check(outputs[k].dtype() == f64, op_, "output ", k, " must be f64, got ", describe(outputs[k]));
        const Tensor weight = draw(outputs[k], generator);
        weights_.push_back(weight + sign(weight) * 0.5);  // no weight is close to 0
      }
      outputs = {projection(inputs_)};
    }
    center_ = measure_at({}, 0);
    const double again = measure_at({}, 0);
    check(center_ == again || (std::isnan(center_) && std::isnan(again)), op_,
          "the outputs changed between two identical calls: a linear combination of their elements was ", center_,
          ", then ", again);
    for (size_t i : active_) inputs.push_back(inputs_[i]);
    if (!outputs[0].requires_grad()) outputs.clear();
    gradients_ = defined_grad(outputs, inputs, {}, false);
    for (size_t a = 0; options_.projections == 0 && a < active_.size(); ++a)
      for (int64_t i = 0; i < inputs[a].numel(); ++i) {
        const Dims index = unravel(i, inputs[a].shape());
        Tensors unit(active_.size());
        unit[a] = zeros_like(inputs[a]);
        unit[a].set(index, 1);
        compare(unit, concat(name(active_[a]), " at ", index));
      }
    for (int k = 0; k < options_.projections; ++k) {
      Tensors directions;
      for (const Tensor& input : inputs) directions.push_back(draw(input, generator));
      compare(directions, concat("projection ", k, " of all inputs and outputs"));
    }
    if (report_.passed && report_.checked == 0 && report_.kinks > 0) {
      report_.passed = false;
      report_.message = concat(op_, ": all ", report_.kinks, " derivatives were skipped as kinks; nothing was checked");
    }
    if (failures_ > 0) report_.message += concat(" (", failures_, " of ", report_.checked, " derivatives differ)");
    return report_;
  }

 private:
  std::string name(size_t input) const {
    return input < count_ ? concat("input ", input) : concat("grad_output ", input - count_);
  }

  /// Returns the sum of all elements of the outputs, multiplied by their weights.
  Tensor projection(const Tensors& inputs) const {
    const Tensors outputs = floating(function_(inputs));
    Tensor total = zeros({}, {.dtype = f64});
    for (size_t k = 0; k < weights_.size(); ++k) {
      check(k < outputs.size() && outputs[k].shape() == weights_[k].shape(), op_,
            "the function's outputs changed in size between two identical calls");
      total = total + sum(outputs[k] * weights_[k]).to(total.device());
    }
    return total;
  }

  /// Returns the projection after a step from the inputs. An input whose direction is undefined stays unchanged.
  double measure_at(const Tensors& directions, double step) const {
    const NoGradGuard no_grad;
    Tensors points;
    for (const Tensor& input : inputs_) points.push_back(input.defined() ? input.detach().clone() : input);
    for (size_t a = 0; a < directions.size(); ++a)
      if (directions[a].defined()) points[active_[a]].add_(directions[a], step);
    return projection(points).item();
  }

  /// Normalizes the direction to length 1, compares the derivative along it with central differences, and updates the
  /// report. `place` names the derivative in the message, which describes the largest failure so far.
  void compare(const Tensors& directions, const std::string& place) {
    double square = 0, analytic = 0;
    for (size_t a = 0; a < directions.size(); ++a)
      if (directions[a].defined()) {
        square += sum(directions[a] * directions[a]).item();
        analytic += sum(directions[a] * gradients_[a]).item();
      }
    const double length = square > 0 ? std::sqrt(square) : 1;
    analytic /= length;
    // Returns the central difference quotient, and the distance between the one-sided quotients.
    const auto difference = [&](double eps) {
      const double left = (center_ - measure_at(directions, -eps / length)) / eps;
      const double right = (measure_at(directions, eps / length) - center_) / eps;
      return std::pair(0.5 * (left + right), std::abs(right - left));
    };
    auto [numeric, jump] = difference(options_.eps);
    if (options_.skip_kinks && jump > options_.atol + options_.rtol * std::abs(numeric)) {
      // If the one-sided quotients differ because of curvature, a smaller step reduces the difference. At a kink, the
      // difference stays.
      const auto [closer, closer_jump] = difference(options_.eps / 4);
      if (closer_jump > 0.5 * jump) {
        ++report_.kinks;
        return;
      }
      numeric = closer;
    }
    const double error = std::abs(analytic - numeric);
    const double excess = error / (options_.atol + options_.rtol * std::abs(numeric));
    ++report_.checked;
    if (!(error <= report_.max_error)) report_.max_error = error;
    if (error == 0 || excess <= 1) return;
    report_.passed = false;
    if (++failures_ > 1 && !(excess > max_excess_)) return;
    max_excess_ = excess;
    std::ostringstream out;
    out.precision(10);
    out << op_ << ": " << place << ": analytic " << analytic << ", numeric " << numeric;
    report_.message = out.str();
  }

  const char* op_;
  const Function& function_;
  const GradcheckOptions& options_;
  size_t count_;
  Tensors inputs_;              // detached copies of the inputs, with the same requires_grad
  std::vector<size_t> active_;  // indices of the inputs that require grad
  Tensors gradients_;           // gradients of the projection with respect to the active inputs
  Tensors weights_;             // weights of the elements of each output in the projection
  double center_ = 0;           // the projection at the inputs
  GradcheckReport report_;
  double max_excess_ = 0;
  int64_t failures_ = 0;
};

}  // namespace

GradcheckReport gradcheck(const Function& function, const Tensors& inputs, const GradcheckOptions& options) {
  return Check("gradcheck", function, inputs, options, inputs.size()).run();
}

GradcheckReport gradgradcheck(const Function& function, const Tensors& inputs, const GradcheckOptions& options) {
  constexpr const char* kOp = "gradgradcheck";
  check(static_cast<bool>(function), kOp, "the function is empty");
  const std::vector<size_t> active = active_inputs(kOp, inputs);
  const auto differentiable = [function](const Tensors& points) {
    Tensors kept;
    for (const Tensor& output : floating(function(points)))
      if (output.requires_grad()) kept.push_back(output);
    return kept;
  };
  Tensors arguments = inputs;
  {
    const GradModeGuard recording(true);
    Generator generator(options.seed + 1);
    for (const Tensor& output : differentiable(inputs)) arguments.push_back(draw(output, generator).requires_grad_());
  }
  const size_t count = inputs.size();
  check(arguments.size() > count, kOp, "no output requires grad");

  // The backward pass differentiates gradients that were computed with create_graph. The central differences use
  // gradients that were computed without create_graph. Thus the check also fails if an operator computes different
  // gradients in the two modes. (Gradients are linear in the grad_outputs. Different gradients therefore have different
  // derivatives with respect to the grad_outputs.)
  const Function gradients = [=](const Tensors& points) {
    const bool create_graph = grad_enabled();
    const GradModeGuard recording(true);
    const auto middle = points.begin() + static_cast<std::ptrdiff_t>(count);
    Tensors leaves(points.begin(), middle), differentiated;
    for (size_t i : active) {
      if (!leaves[i].requires_grad()) leaves[i] = leaves[i].detach().requires_grad_();
      differentiated.push_back(leaves[i]);
    }
    return defined_grad(differentiable(leaves), differentiated, Tensors(middle, points.end()), create_graph);
  };
  return Check(kOp, gradients, arguments, options, count).run();
}

}  // namespace voxgrad
