// Cases of elementwise operators, activations, comparisons, copies and creation functions.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

/// Edge shapes for functions of one tensor.
const std::vector<std::vector<Shape>> kUnaryEdges{{Shape{}}, {{0}}, {{1}}, {{2, 0, 3}}, {{1, 1, 1}}};
/// Edge shapes for functions of two tensors that broadcast.
const std::vector<std::vector<Shape>> kBinaryEdges{{Shape{}, Shape{}}, {{0}, {1}},        {{2, 0}, {2, 1}},
                                                   {{1}, {3, 1}},      {{2, 3}, Shape{}}, {{1, 1}, {1}}};

struct Unary {
  const char* name;
  Tensor (*function)(const Tensor&);
  double (*formula)(double);
  Domain domain = Domain::any;
  bool differentiable = true;
  int roundings = 1;
};

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }
double gelu_of(double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); }

void add_unary(std::vector<OpCase>& cases, std::span<const Unary> table) {
  for (const Unary& u : table) {
    OpCase c{u.name, [f = u.function](const Tensors& t) { return f(t[0]); }, {{{2, 3, 4}, u.domain}}};
    c.reference = [f = u.formula](const Arrays& a) { return reference::map(a[0], f); };
    c.edges = kUnaryEdges;
    c.differentiable = u.differentiable;
    c.keeps_layout = u.differentiable && c.name != "contiguous";
    c.roundings = u.roundings;
    cases.push_back(c);
  }
}

void add_functions(std::vector<OpCase>& cases) {
  const Unary table[] = {
      {"neg", neg, [](double x) { return -x; }},
      {"abs", abs, [](double x) { return std::fabs(x); }, Domain::nonzero},
      {"exp", exp, [](double x) { return std::exp(x); }},
      {"log", log, [](double x) { return std::log(x); }, Domain::positive},
      {"sqrt", sqrt, [](double x) { return std::sqrt(x); }, Domain::positive},
      {"rsqrt", rsqrt, [](double x) { return 1 / std::sqrt(x); }, Domain::positive},
      {"reciprocal", reciprocal, [](double x) { return 1 / x; }, Domain::nonzero},
      {"sin", sin, [](double x) { return std::sin(x); }},
      {"cos", cos, [](double x) { return std::cos(x); }},
      {"erf", erf, [](double x) { return std::erf(x); }},
      {"sign", sign, [](double x) { return x > 0   ? 1.0
                                           : x < 0 ? -1.0
                                                   : 0.0; }, Domain::nonzero},
      {"relu", relu, [](double x) { return x > 0 ? x : 0; }, Domain::nonzero},
      {"leaky_relu", [](const Tensor& x) { return leaky_relu(x); }, [](double x) { return x > 0 ? x : 0.01 * x; },
       Domain::nonzero},
      {"leaky_relu_steep", [](const Tensor& x) { return leaky_relu(x, -0.5); },
       [](double x) { return x > 0 ? x : -0.5 * x; }, Domain::nonzero},
      {"sigmoid", sigmoid, sigmoid_of},
      {"tanh", tanh, [](double x) { return std::tanh(x); }},
      {"gelu", gelu, gelu_of},
      {"silu", silu, [](double x) { return x * sigmoid_of(x); }},
      {"mish", mish, [](double x) { return x * std::tanh(std::log1p(std::exp(x))); }},
      {"elu", [](const Tensor& x) { return elu(x, 1.5); }, [](double x) { return x > 0 ? x : 1.5 * std::expm1(x); },
       Domain::nonzero},
      {"selu", selu, [](double x) { return 1.0507009873554805 * (x > 0 ? x : 1.6732632423543772 * std::expm1(x)); },
       Domain::nonzero},
      {"hardsigmoid", [](const Tensor& x) { return hardsigmoid(x * 2.5); },
       [](double x) { return std::clamp(2.5 * x / 6 + 0.5, 0.0, 1.0); }, Domain::nonzero},
      {"hardswish", [](const Tensor& x) { return hardswish(x * 2.5); },
       [](double x) { return 2.5 * x * std::clamp(2.5 * x / 6 + 0.5, 0.0, 1.0); }, Domain::nonzero, true, 2},
      {"softplus", [](const Tensor& x) { return softplus(x); }, [](double x) { return std::log(1 + std::exp(x)); }},
      {"softplus_beta", [](const Tensor& x) { return softplus(x, 3, 2); },
       [](double x) { return 3 * x > 2 ? x : std::log(1 + std::exp(3 * x)) / 3; }},
      {"clamp", [](const Tensor& x) { return clamp(x, -0.25, 1); },
       [](double x) { return x < -0.25 ? -0.25
                             : x > 1   ? 1
                                       : x; }, Domain::nonzero},
      {"clamp_min", [](const Tensor& x) { return clamp_min(x, 0.1); }, [](double x) { return x < 0.1 ? 0.1 : x; },
       Domain::nonzero},
      {"clamp_max", [](const Tensor& x) { return clamp_max(x, 0.1); }, [](double x) { return x > 0.1 ? 0.1 : x; },
       Domain::nonzero},
      {"affine", [](const Tensor& x) { return affine(x, 2.5, -1); }, [](double x) { return 2.5 * x - 1; }},
      {"pow_2", [](const Tensor& x) { return pow(x, 2); }, [](double x) { return x * x; }},
      {"pow_3", [](const Tensor& x) { return pow(x, 3); }, [](double x) { return x * x * x; }},
      {"pow_0", [](const Tensor& x) { return pow(x, 0); }, [](double) { return 1.0; }},
      {"pow_1", [](const Tensor& x) { return pow(x, 1); }, [](double x) { return x; }},
      {"pow_minus_half", [](const Tensor& x) { return pow(x, -0.5); }, [](double x) { return 1 / std::sqrt(x); },
       Domain::positive},
  };
  add_unary(cases, table);
}

void add_numbers_and_conversions(std::vector<OpCase>& cases) {
  const Unary table[] = {
      {"plus_number", [](const Tensor& x) { return x + 1.5; }, [](double x) { return x + 1.5; }},
      {"minus_number", [](const Tensor& x) { return x - 1.5; }, [](double x) { return x - 1.5; }},
      {"times_number", [](const Tensor& x) { return x * 1.5; }, [](double x) { return x * 1.5; }},
      {"over_number", [](const Tensor& x) { return x / 1.5; }, [](double x) { return x / 1.5; }},
      {"number_plus", [](const Tensor& x) { return 1.5 + x; }, [](double x) { return 1.5 + x; }},
      {"number_minus", [](const Tensor& x) { return 1.5 - x; }, [](double x) { return 1.5 - x; }},
      {"number_times", [](const Tensor& x) { return 1.5 * x; }, [](double x) { return 1.5 * x; }},
      {"number_over", [](const Tensor& x) { return 1.5 / x; }, [](double x) { return 1.5 / x; }, Domain::nonzero},
      {"one_over", [](const Tensor& x) { return 1.0 / x; }, [](double x) { return 1 / x; }, Domain::nonzero},
      {"minus", [](const Tensor& x) { return -x; }, [](double x) { return -x; }},
      {"clone", [](const Tensor& x) { return x.clone(); }, [](double x) { return x; }},
      {"contiguous", [](const Tensor& x) { return x.contiguous(); }, [](double x) { return x; }},
      {"to_f64", [](const Tensor& x) { return x.to(f64).to(x.dtype()); }, [](double x) { return x; }},
      {"dropout_eval", [](const Tensor& x) { return dropout(x, 0.5, false); }, [](double x) { return x; }},
      {"dropout_all", [](const Tensor& x) { return dropout(x, 1.0); }, [](double) { return 0.0; }},
      {"isfinite", [](const Tensor& x) { return isfinite(log(x)); }, [](double x) { return x > 0 ? 1.0 : 0.0; },
       Domain::ties, false},
      {"logical_not", [](const Tensor& x) { return logical_not(gt(x, x * 0.5)); },
       [](double x) { return x > 0 ? 0.0 : 1.0; }, Domain::nonzero, false},
      {"to_i64", [](const Tensor& x) { return x.to(i64); }, [](double x) { return std::trunc(x); }, Domain::any, false},
      {"to_bool", [](const Tensor& x) { return x.to(b8); }, [](double x) { return x != 0 ? 1.0 : 0.0; }, Domain::ties,
       false},
      {"zeros_like", zeros_like, [](double) { return 0.0; }, Domain::any, false},
      {"ones_like", ones_like, [](double) { return 1.0; }, Domain::any, false},
      {"full_like", [](const Tensor& x) { return full_like(x, 2.5); }, [](double) { return 2.5; }, Domain::any, false},
      {"zeros", [](const Tensor& x) { return zeros(x.shape(), x.options()); }, [](double) { return 0.0; }, Domain::any,
       false},
      {"ones", [](const Tensor& x) { return ones(x.shape(), x.options()); }, [](double) { return 1.0; }, Domain::any,
       false},
  };
  add_unary(cases, table);
}

struct Binary {
  const char* name;
  Tensor (*function)(const Tensor&, const Tensor&);
  double (*formula)(double, double);
  Domain x = Domain::any;
  Domain y = Domain::any;
  bool differentiable = true;
};

void add_binary(std::vector<OpCase>& cases) {
  const Binary table[] = {
      {"add", add, [](double x, double y) { return x + y; }},
      {"sub", sub, [](double x, double y) { return x - y; }},
      {"mul", mul, [](double x, double y) { return x * y; }},
      {"div", div, [](double x, double y) { return x / y; }, Domain::any, Domain::nonzero},
      {"plus", [](const Tensor& x, const Tensor& y) { return x + y; }, [](double x, double y) { return x + y; }},
      {"minus_pair", [](const Tensor& x, const Tensor& y) { return x - y; }, [](double x, double y) { return x - y; }},
      {"times", [](const Tensor& x, const Tensor& y) { return x * y; }, [](double x, double y) { return x * y; }},
      {"over", [](const Tensor& x, const Tensor& y) { return x / y; }, [](double x, double y) { return x / y; },
       Domain::any, Domain::nonzero},
      {"pow_pair", pow, [](double x, double y) { return std::pow(x, y); }, Domain::positive, Domain::any},
      {"add_method", [](const Tensor& x, const Tensor& y) { return x.add(y); },
       [](double x, double y) { return x + y; }},
      // The operands differ by at least 0.25, so that no finite difference crosses a tie.
      {"maximum", [](const Tensor& x, const Tensor& y) { return maximum(x, y + 0.25); },
       [](double x, double y) { return std::fmax(x, y + 0.25); }, Domain::integers, Domain::integers},
      {"minimum", [](const Tensor& x, const Tensor& y) { return minimum(x, y + 0.25); },
       [](double x, double y) { return std::fmin(x, y + 0.25); }, Domain::integers, Domain::integers},
      {"eq", eq, [](double x, double y) { return x == y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
      {"ne", ne, [](double x, double y) { return x != y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
      {"lt", lt, [](double x, double y) { return x < y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
      {"le", le, [](double x, double y) { return x <= y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
      {"gt", gt, [](double x, double y) { return x > y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
      {"ge", ge, [](double x, double y) { return x >= y ? 1.0 : 0.0; }, Domain::ties, Domain::ties, false},
  };
  const std::pair<Shape, Shape> shapes[] = {{{2, 3, 2}, {2, 3, 2}}, {{2, 1, 2}, {3, 1}}, {{2}, {2, 3, 2}}};
  const char* suffix[] = {"", "_both_stretched", "_first_stretched"};
  for (const Binary& b : table)
    for (size_t i = 0; i < 3; ++i) {
      OpCase c{std::string(b.name) + suffix[i],
               [f = b.function](const Tensors& t) { return f(t[0], t[1]); },
               {{shapes[i].first, b.x}, {shapes[i].second, b.y}}};
      c.reference = [f = b.formula](const Arrays& a) { return reference::map(a[0], a[1], f); };
      if (i == 0) c.edges = kBinaryEdges;
      c.differentiable = b.differentiable;
      cases.push_back(c);
    }
}

Array where_reference(const Arrays& a) {
  const Shape shape = broadcast_shapes(broadcast_shapes(a[0].shape, a[1].shape, "where"), a[2].shape, "where");
  return reference::build(shape, [&](const Dims& i) {
    return reference::broadcast(a[0], i) != 0 ? reference::broadcast(a[1], i) : reference::broadcast(a[2], i);
  });
}

void add_others(std::vector<OpCase>& cases) {
  const Function pick = [](const Tensors& t) { return where(t[0], t[1], t[2]); };
  cases.push_back({"where",
                   pick,
                   {{{2, 3}, Domain::boolean}, {{2, 3}}, {{2, 3}}},
                   where_reference,
                   {{{0, 3}, {0, 3}, {0, 1}}, {Shape{}, Shape{}, Shape{}}, {{1, 1}, {1}, {1, 1}}}});
  cases.push_back({"where_stretched", pick, {{{2, 1, 1}, Domain::boolean}, {{3, 1}}, {{2}}}, where_reference});
  // At ties, each operand receives half of the gradient, so the sum agrees with finite differences.
  cases.push_back({"maximum_self",
                   [](const Tensors& t) { return maximum(t[0], t[0] * 1.0); },
                   {{{2, 3}}},
                   [](const Arrays& a) { return a[0]; }});
  // Some elements are zero in both factors of the product.
  cases.push_back({"square_of_zero",
                   [](const Tensors& t) { return t[0] * t[0]; },
                   {{{5}, Domain::ties}},
                   [](const Arrays& a) { return reference::map(a[0], [](double x) { return x * x; }); }});
}

void add_creations(std::vector<OpCase>& cases) {
  const auto add_creation = [&](const char* name, Function function, Reference expected) {
    OpCase c{name, std::move(function), {{{4, 3}}}, std::move(expected)};
    c.differentiable = false;
    cases.push_back(c);
  };
  add_creation(
      "arange", [](const Tensors& t) { return arange(-1, 2, 0.25, t[0].options()); },
      [](const Arrays&) {
        return reference::build({12}, [](const Dims& i) { return -1 + 0.25 * static_cast<double>(i[0]); });
      });
  add_creation(
      "arange_down", [](const Tensors& t) { return arange(3, -1, -2, t[0].options()); },
      [](const Arrays&) {
        return Array{{2}, {3, 1}};
      });
  add_creation(
      "linspace", [](const Tensors& t) { return linspace(-1, 2, 7, t[0].options()); },
      [](const Arrays&) {
        return reference::build({7}, [](const Dims& i) { return -1 + 0.5 * static_cast<double>(i[0]); });
      });
  add_creation(
      "full",
      [](const Tensors& t) {
        return full({2, 2}, -3.5, t[0].options());
      },
      [](const Arrays&) {
        return Array{{2, 2}, {-3.5, -3.5, -3.5, -3.5}};
      });
  add_creation(
      "tensor",
      [](const Tensors& t) {
        return tensor({{1, 2.5}, {-3, 0}}, t[0].options());
      },
      [](const Arrays&) {
        return Array{{2, 2}, {1, 2.5, -3, 0}};
      });
  // Random functions have no reference, so the test compares the devices with each other. f32 and f64 draw different
  // numbers.
  const auto add_random = [&](const char* name, auto sample) {
    add_creation(name,
                 [sample](const Tensors& t) {
                   Generator generator(7);
                   return sample(t[0], &generator);
                 },
                 {});
  };
  add_random("rand", [](const Tensor& x, Generator* g) { return rand(x.shape(), {x.dtype(), x.device()}, g); });
  add_random("randn", [](const Tensor& x, Generator* g) { return randn(x.shape(), {x.dtype(), x.device()}, g); });
  add_random("rand_like", [](const Tensor& x, Generator* g) { return rand_like(x, g); });
  add_random("randn_like", [](const Tensor& x, Generator* g) { return randn_like(x, g); });
  OpCase dropped{"dropout",
                 [](const Tensors& t) {
                   Generator generator(7);
                   return dropout(t[0].to(f64), 0.4, true, &generator).to(t[0].dtype());
                 },
                 {{{5, 4}}}};
  cases.push_back(dropped);
  cases.push_back({"dropout3d",
                   [](const Tensors& t) {
                     Generator generator(7);
                     return dropout3d(t[0].to(f64), 0.4, true, &generator).to(t[0].dtype());
                   },
                   {{{2, 3, 2, 2, 2}}}});
}

}  // namespace

void add_elementwise_cases(std::vector<OpCase>& cases) {
  add_functions(cases);
  add_numbers_and_conversions(cases);
  add_binary(cases);
  add_others(cases);
  add_creations(cases);
}

}  // namespace voxgrad::optest
