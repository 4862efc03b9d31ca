// Checks of gradients against central differences.
//
// Check::compare() takes the derivatives of all measured values along one direction, computed by the backward pass. It
// compares them with the differences of the values after small steps in both directions. By default, each direction is
// one element of an input and the measured values are the elements of the outputs. With projections, a direction is a
// random vector over all inputs, and the measured value is a random linear combination of all outputs. gradgradcheck
// applies the same check to the function that computes the gradients.
#include "ops/gradcheck.h"

#include <cmath>
#include <optional>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/checks.h"
#include "ops/elementwise.h"

namespace voxgrad {
namespace {

using Function = std::function<Tensors(const Tensors&)>;
using Values = std::vector<double>;
using Names = std::function<std::string(size_t number)>;

/// Converts the row-major position `flat` in `shape` to an index.
Dims unravel(int64_t flat, const Shape& shape) {
  Dims index = shape;
  for (int64_t axis = shape.size() - 1; axis >= 0; --axis) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  return index;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Returns the tensors that are defined and have a floating dtype.
Tensors floating(const Tensors& tensors) {
  Tensors kept;
  for (const Tensor& t : tensors)
    if (t.defined() && is_floating(t.dtype())) kept.push_back(t);
  return kept;
}

/// The one-sided difference quotients at a point.
struct Quotients {
  double left, right;
  double central() const { return 0.5 * (left + right); }
  double jump() const { return std::abs(right - left); }
};

/// One run of gradcheck.
class Check {
 public:
  Check(const char* op, Function function, const Tensors& inputs, const GradcheckOptions& options, Names input_name,
        Names output_name);
  GradcheckReport run();

 private:
  /// Moves the points by `step` along a direction. A step of 0 restores them.
  using Shift = std::function<void(double step)>;

  Values measure() const;
  void require_determinism() const;
  void record_graph();
  Tensors gradients(const Tensors& outputs, const Tensors& grad_outputs) const;
  void check_elements();
  void check_projection(int number, Generator& generator);
  void compare(const Shift& shift, const Values& analytic, const Names& place);
  Values measure_at(const Shift& shift, double step) const;
  void check_derivative(double analytic, double numeric, const std::function<std::string()>& place);

  const char* op_;
  Function function_;
  GradcheckOptions options_;
  Names input_name_, output_name_;
  Tensors points_;              // inputs for the differences; Shift modifies them
  Tensors leaves_;              // inputs for the backward pass, with the original values
  std::vector<size_t> active_;  // indices of the inputs that require grad
  Tensors outputs_;             // function(leaves), recorded
  Values weights_;              // weights of the output elements in a projection; empty: measure each element
  GradcheckReport report_;
  double max_excess_ = 0;
  int64_t failures_ = 0;
};

Check::Check(const char* op, Function function, const Tensors& inputs, const GradcheckOptions& options,
             Names input_name, Names output_name)
    : op_(op),
      function_(std::move(function)),
      options_(options),
      input_name_(std::move(input_name)),
      output_name_(std::move(output_name)) {
  check(static_cast<bool>(function_), op, "the function is empty");
  check(std::isfinite(options.eps) && options.eps > 0, op, "eps must be finite and positive, got ", options.eps);
  check(options.atol >= 0 && options.rtol >= 0, op, "tolerances must not be negative, got atol ", options.atol,
        " and rtol ", options.rtol);
  check(options.projections >= 0, op, "projections must not be negative, got ", options.projections);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& input = inputs[i];
    const bool differentiated = input.defined() && input.requires_grad();
    check(!input.defined() || !is_floating(input.dtype()) || input.dtype() == f64, op, input_name_(i),
          " must be f64, got ", describe(input));
    points_.push_back(input.defined() ? input.detach().clone() : input);
    leaves_.push_back(input.defined() ? input.detach().clone() : input);
    if (!differentiated) continue;
    leaves_.back().requires_grad_();
    active_.push_back(i);
  }
  check(!active_.empty(), op, "none of the inputs requires grad");
}

/// Returns the elements of all outputs, concatenated, or their projection.
Values Check::measure() const {
  NoGradGuard no_grad;
  const Tensors outputs = floating(function_(points_));
  check(!outputs.empty(), op_, "the function returned no floating tensor");
  Values values;
  for (size_t k = 0; k < outputs.size(); ++k) {
    check(outputs[k].dtype() == f64, op_, output_name_(k), " must be f64, got ", describe(outputs[k]));
    const Values more = outputs[k].to_vector<double>();
    values.insert(values.end(), more.begin(), more.end());
  }
  return weights_.empty() ? values : Values{dot(values, weights_)};
}

void Check::require_determinism() const {
  const Values first = measure(), second = measure();
  check(first.size() == second.size(), op_, "the function's outputs changed in size between two identical calls");
  for (size_t i = 0; i < first.size(); ++i)
    check(first[i] == second[i] || (std::isnan(first[i]) && std::isnan(second[i])), op_,
          "the outputs changed between two identical calls: element ", i, " was ", first[i], ", then ", second[i]);
}

void Check::record_graph() {
  GradModeGuard recording(true);
  outputs_ = floating(function_(leaves_));
}

/// Returns the gradients of the active inputs. The gradient of an input on which no output depends is zero.
Tensors Check::gradients(const Tensors& outputs, const Tensors& grad_outputs) const {
  Tensors inputs, found(active_.size());
  for (size_t i : active_) inputs.push_back(leaves_[i]);
  if (!outputs.empty()) found = autograd::grad(outputs, inputs, grad_outputs, true, false, true);
  for (size_t i = 0; i < found.size(); ++i)
    if (!found[i].defined()) found[i] = zeros(inputs[i].shape(), inputs[i].options());
  return found;
}

GradcheckReport Check::run() {
  require_determinism();
  record_graph();
  if (options_.projections == 0) check_elements();
  Generator generator(options_.seed);
  for (int k = 0; k < options_.projections; ++k) check_projection(k, generator);
  if (report_.passed && report_.checked == 0 && report_.kinks > 0) {
    report_.passed = false;
    report_.message = concat(op_, ": all ", report_.kinks, " derivatives were skipped as kinks; nothing was checked");
  }
  if (failures_ > 0) report_.message += concat(" (", failures_, " of ", report_.checked, " derivatives differ)");
  return report_;
}

void Check::check_elements() {
  // Compute the Jacobian: jacobian[input][output element] is the gradient of the output element in that input.
  std::vector<std::vector<Values>> jacobian(active_.size());
  std::vector<std::pair<size_t, int64_t>> measured;  // output and position of each measured value
  for (size_t k = 0; k < outputs_.size(); ++k) {
    const Tensor& output = outputs_[k];
    const Tensor unit = zeros(output.shape(), output.options());
    for (int64_t j = 0; j < output.numel(); ++j) {
      const Dims index = unravel(j, output.shape());
      unit.set(index, 1);
      const Tensors grads = output.requires_grad() ? gradients({output}, {unit}) : gradients({}, {});
      for (size_t a = 0; a < grads.size(); ++a) jacobian[a].push_back(grads[a].to_vector<double>());
      unit.set(index, 0);
      measured.push_back({k, j});
    }
  }
  // Compare each column with the differences that a step in one element of the input gives.
  for (size_t a = 0; a < active_.size(); ++a) {
    const Tensor& point = points_[active_[a]];
    for (int64_t i = 0; i < point.numel(); ++i) {
      const Dims index = unravel(i, point.shape());
      const double center = point.at(index);
      Values analytic;
      for (const Values& row : jacobian[a]) analytic.push_back(row[static_cast<size_t>(i)]);
      compare([&](double step) { point.set(index, center + step); }, analytic,
              [&](size_t m) {
                const auto [k, j] = measured[m];
                return concat(input_name_(active_[a]), " at ", index, ", ", output_name_(k), " at ",
                              unravel(j, outputs_[k].shape()));
              });
    }
  }
}

void Check::check_projection(int number, Generator& generator) {
  const auto draw = [&](const Tensor& like) { return randn(like.shape(), {.dtype = f64}, &generator); };
  // Draw the weights of the outputs.
  Tensors grad_outputs, recorded;
  weights_.clear();
  for (const Tensor& output : outputs_) {
    const Tensor weight = draw(output);
    const Values values = weight.to_vector<double>();
    weights_.insert(weights_.end(), values.begin(), values.end());
    if (!output.requires_grad()) continue;
    recorded.push_back(output);
    grad_outputs.push_back(weight.to(output.device()));
  }
  // Draw a direction in the space of all inputs.
  Tensors directions, centers;
  double square = 0;
  for (size_t i : active_) {
    directions.push_back(draw(points_[i]));
    centers.push_back(points_[i].clone());
    const Values values = directions.back().to_vector<double>();
    square += dot(values, values);
  }
  const double length = square > 0 ? std::sqrt(square) : 1;
  // Compare the derivative along the direction, normalized to length 1.
  const Tensors grads = gradients(recorded, grad_outputs);
  double analytic = 0;
  for (size_t a = 0; a < active_.size(); ++a) {
    analytic += dot(grads[a].to_vector<double>(), directions[a].to_vector<double>()) / length;
    directions[a] = directions[a].to(points_[active_[a]].device());
  }
  if (weights_.empty()) return;  // the outputs have no elements
  NoGradGuard no_grad;
  compare(
      [&](double step) {
        for (size_t a = 0; a < active_.size(); ++a)
          points_[active_[a]].copy_(step == 0 ? centers[a] : centers[a] + directions[a] * (step / length));
      },
      {analytic}, [&](size_t) { return concat("projection ", number, " of all inputs and outputs"); });
}

Values Check::measure_at(const Shift& shift, double step) const {
  shift(step);
  Values values = measure();
  shift(0);
  return values;
}

/// Compares `analytic`, the derivatives of all measured values along the direction of `shift`, with differences.
/// place(m) describes measured value m in a message.
void Check::compare(const Shift& shift, const Values& analytic, const Names& place) {
  NoGradGuard no_grad;
  const Values center = measure();
  const auto sides = [&](double eps) { return std::pair(measure_at(shift, -eps), measure_at(shift, eps)); };
  const auto quotients = [&](const std::pair<Values, Values>& values, size_t m, double eps) {
    return Quotients{(center[m] - values.first[m]) / eps, (values.second[m] - center[m]) / eps};
  };
  // If the one-sided quotients differ because of curvature, a smaller step reduces the difference. At a kink, the
  // difference stays.
  const double near_eps = options_.eps / 4;
  const auto wide = sides(options_.eps);
  std::optional<std::pair<Values, Values>> near;
  for (size_t m = 0; m < analytic.size(); ++m) {
    Quotients found = quotients(wide, m, options_.eps);
    if (options_.skip_kinks && found.jump() > options_.atol + options_.rtol * std::abs(found.central())) {
      if (!near) near = sides(near_eps);
      const Quotients closer = quotients(*near, m, near_eps);
      if (closer.jump() > 0.5 * found.jump()) {
        ++report_.kinks;
        continue;
      }
      found = closer;
    }
    check_derivative(analytic[m], found.central(), [&] { return place(m); });
  }
}

/// Compares a derivative with its numeric value and updates the report. The message describes the largest failure so
/// far.
void Check::check_derivative(double analytic, double numeric, const std::function<std::string()>& place) {
  ++report_.checked;
  const double error = std::abs(analytic - numeric);
  const double excess = error / (options_.atol + options_.rtol * std::abs(numeric));
  if (!(error <= report_.max_error)) report_.max_error = error;
  if (error == 0 || excess <= 1) return;
  report_.passed = false;
  if (++failures_ > 1 && !(excess > max_excess_)) return;
  max_excess_ = excess;
  std::ostringstream out;
  out.precision(10);
  out << op_ << ": " << place() << ": analytic " << analytic << ", numeric " << numeric;
  report_.message = out.str();
}

Names numbered(const char* what) {
  return [what](size_t number) { return concat(what, ' ', number); };
}

}  // namespace

GradcheckReport gradcheck(const Function& function, const Tensors& inputs, const GradcheckOptions& options) {
  return Check("gradcheck", function, inputs, options, numbered("input"), numbered("output")).run();
}

GradcheckReport gradgradcheck(const Function& function, const Tensors& inputs, const GradcheckOptions& options) {
  constexpr const char* kOp = "gradgradcheck";
  check(static_cast<bool>(function), kOp, "the function is empty");
  std::vector<size_t> active;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && inputs[i].requires_grad()) active.push_back(i);
  check(!active.empty(), kOp, "none of the inputs requires grad");

  const auto differentiable = [function](const Tensors& points) {
    Tensors kept;
    for (const Tensor& output : floating(function(points)))
      if (output.requires_grad()) kept.push_back(output);
    return kept;
  };
  Tensors arguments = inputs;
  {
    GradModeGuard recording(true);
    Generator generator(options.seed + 1);
    for (const Tensor& output : differentiable(inputs)) {
      const Tensor grad = randn(output.shape(), {.dtype = f64}, &generator).to(output.device());
      arguments.push_back(grad.detach().requires_grad_());
    }
  }
  const size_t count = inputs.size();
  check(arguments.size() > count, kOp, "no output requires grad");

  // The backward pass uses gradients that were computed with create_graph; the differences use gradients that were
  // computed without. An operator that computes the two in different ways must get the same gradients. (The difference
  // of two gradients is linear in the grad_outputs, so that it appears in the derivatives with respect to them.)
  const Function gradients = [=](const Tensors& points) {
    const bool create_graph = grad_enabled();
    GradModeGuard recording(true);
    const auto middle = points.begin() + static_cast<std::ptrdiff_t>(count);
    Tensors leaves(points.begin(), middle), differentiated;
    for (size_t i : active) {
      if (!leaves[i].requires_grad()) leaves[i] = leaves[i].detach().requires_grad_();
      differentiated.push_back(leaves[i]);
    }
    Tensors grads = autograd::grad(differentiable(leaves), differentiated, Tensors(middle, points.end()), false,
                                   create_graph, true);
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined()) grads[i] = zeros(differentiated[i].shape(), differentiated[i].options());
    return grads;
  };
  const Names argument = [count](size_t i) {
    return i < count ? concat("input ", i) : concat("grad_output ", i - count);
  };
  const Names gradient = [active](size_t k) { return concat("gradient of input ", active[k]); };
  return Check(kOp, gradients, arguments, options, argument, gradient).run();
}

}  // namespace voxgrad
