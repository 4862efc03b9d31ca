// Cases of reductions, softmax, matrix products, attention and elementwise losses.
#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/optim.h"
#include "ops/reduce.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

using List = std::vector<double>;
double largest(const List& v) { return *std::max_element(v.begin(), v.end()); }
double smallest(const List& v) { return *std::min_element(v.begin(), v.end()); }
double squared_deviations(const List& v) {
  const double center = reference::mean(v);
  double total = 0;
  for (double x : v) total += (x - center) * (x - center);
  return total;
}

template <int correction>
Tensor deviation(const Tensor& x, const Axes& axes, bool keepdim) {
  return std(x, axes, correction, keepdim);
}
double product(const List& v) {
  double result = 1;
  for (double x : v) result *= x;
  return result;
}

/// Calls norm() with p = kTwiceP / 2.
template <int kTwiceP>
Tensor norm_of(const Tensor& x, const Axes& axes, bool keepdim) {
  return norm(x, kTwiceP / 2.0, axes, keepdim);
}
/// The reference of norm_of().
template <int kTwiceP>
double p_norm(const List& v) {
  double total = 0;
  for (double x : v) total += std::pow(std::fabs(x), kTwiceP / 2.0);
  return std::pow(total, 2.0 / kTwiceP);
}

void add_reductions(std::vector<OpCase>& cases) {
  struct Reduction {
    const char* name;
    Tensor (*function)(const Tensor&, const Axes&, bool);
    double (*formula)(const List&);
    Domain domain = Domain::any;
    bool accepts_empty = true;  // whether the reduction of zero elements is defined
  };
  const Reduction table[] = {
      {"sum", sum, reference::sum},
      {"mean", mean, reference::mean, Domain::any, false},
      {"amax", amax, largest, Domain::distinct, false},
      {"amin", amin, smallest, Domain::distinct, false},
      {"var", [](const Tensor& x, const Axes& axes, bool keepdim) { return var(x, axes, 1, keepdim); },
       [](const List& v) { return squared_deviations(v) / (static_cast<double>(v.size()) - 1); }, Domain::any, false},
      {"var_biased", [](const Tensor& x, const Axes& axes, bool keepdim) { return var(x, axes, 0, keepdim); },
       [](const List& v) { return squared_deviations(v) / static_cast<double>(v.size()); }, Domain::any, false},
      {"std", deviation<1>,
       [](const List& v) { return std::sqrt(squared_deviations(v) / (static_cast<double>(v.size()) - 1)); },
       Domain::any, false},
      {"std_biased", deviation<0>,
       [](const List& v) { return std::sqrt(squared_deviations(v) / static_cast<double>(v.size())); }, Domain::any,
       false},
      {"prod", prod, product},
      {"norm", norm_of<4>, p_norm<4>},
      {"norm_of_sizes", norm_of<2>, p_norm<2>, Domain::nonzero},
      {"norm_to_three", norm_of<6>, p_norm<6>, Domain::nonzero},
      {"norm_to_half", norm_of<1>, p_norm<1>, Domain::nonzero},
      {"norm_largest", [](const Tensor& x, const Axes& axes, bool keepdim) { return norm(x, INFINITY, axes, keepdim); },
       [](const List& v) { return std::max(largest(v), -smallest(v)); }, Domain::nonzero, false},
      {"logsumexp", logsumexp,
       [](const List& v) {
         double total = 0;
         for (double x : v) total += std::exp(x);
         return std::log(total);
       }},
  };
  struct Form {
    const char* suffix;
    Dims axes;
    bool keepdim;
  };
  const Form forms[] = {{"_all", {}, false},   {"_all_kept", {}, true},    {"_last", {-1}, false},
                        {"_first", {0}, true}, {"_outer", {0, -1}, false}, {"_middle", {1, 2}, true}};
  for (const Reduction& r : table)
    for (const Form& form : forms) {
      OpCase c{std::string(r.name) + form.suffix,
               [=](const Tensors& t) { return r.function(t[0], form.axes, form.keepdim); },
               {{{2, 3, 2, 2}, r.domain}}};
      c.reference = [=](const Arrays& a) { return reference::reduce(a[0], form.axes, form.keepdim, r.formula); };
      const std::string name = r.name;
      if (name != "var" && name != "std" && name != "std_biased") c.edges = {{{1, 1, 1, 1}}};
      if (r.accepts_empty) c.edges.push_back({{0, 3, 2, 0}});
      cases.push_back(c);
    }
}

void add_other_reductions(std::vector<OpCase>& cases) {
  cases.push_back({"sum_to",
                   [](const Tensors& t) {
                     return sum_to(t[0], {3, 1});
                   },
                   {{{2, 3, 4}}},
                   [](const Arrays& a) {
                     return reference::reshaped(reference::reduce(a[0], {0, 2}, true, reference::sum), {3, 1});
                   }});
  cases.push_back({"sum_method",
                   [](const Tensors& t) { return t[0].sum({1}); },
                   {{{2, 3}}},
                   [](const Arrays& a) { return reference::reduce(a[0], {1}, false, reference::sum); }});
  cases.push_back({"mean_method",
                   [](const Tensors& t) { return t[0].mean(); },
                   {{{2, 3}}},
                   [](const Arrays& a) { return reference::reduce(a[0], {}, false, reference::mean); }});
  OpCase integers{"sum_of_bools",
                  [](const Tensors& t) { return sum(t[0], {1}); },
                  {{{3, 5}, Domain::boolean}},
                  [](const Arrays& a) { return reference::reduce(a[0], {1}, false, reference::sum); }};
  integers.differentiable = false;
  cases.push_back(integers);
  OpCase whole{"amax_of_integers",
               [](const Tensors& t) { return amax(t[0], {0}); },
               {{{3, 5}, Domain::index, 9}},
               [](const Arrays& a) { return reference::reduce(a[0], {0}, false, largest); }};
  whole.differentiable = false;
  cases.push_back(whole);
  OpCase squares{"sum_of_squares",
                 [](const Tensors& t) { return sum_of_squares(t); },
                 {{{3, 4, 2}}, {{5}}},
                 [](const Arrays& a) {
                   Array total{{}, {0}};
                   for (const Array& x : a)
                     for (const double v : x.values) total.values[0] += v * v;
                   return total;
                 }};
  squares.differentiable = false;
  cases.push_back(squares);
}

void add_softmax(std::vector<OpCase>& cases) {
  for (const bool logarithm : {false, true})
    for (const int64_t axis : {0, 1, -1}) {
      OpCase c{std::string(logarithm ? "log_softmax" : "softmax") + (axis < 0 ? "_last"
                                                                     : axis   ? "_middle"
                                                                              : "_first"),
               [=](const Tensors& t) { return logarithm ? log_softmax(t[0], axis) : softmax(t[0], axis); },
               {{{2, 3, 4}}}};
      c.reference = [=](const Arrays& a) { return reference::softmax(a[0], axis, logarithm); };
      c.edges = {{{1, 1, 1}}, {{0, 0, 0}}, {{2, 3, 1, 2}}};
      c.keeps_layout = true;
      cases.push_back(c);
    }
}

void add_linalg(std::vector<OpCase>& cases) {
  struct Product {
    const char* name;
    Shape a;
    Shape b;
  };
  const Product table[] = {
      {"matmul_matrices", {3, 4}, {4, 2}},
      {"matmul_vectors", {4}, {4}},
      {"matmul_matrix_vector", {3, 4}, {4}},
      {"matmul_vector_matrix", {4}, {4, 3}},
      {"matmul_batch", {2, 3, 4}, {2, 4, 2}},
      {"matmul_batch_times_matrix", {2, 3, 4}, {4, 2}},
      {"matmul_matrix_times_batch", {3, 4}, {2, 4, 2}},
      {"matmul_broadcast", {2, 1, 2, 3}, {3, 3, 2}},
      {"matmul_batch_vector", {2, 3, 4}, {4}},
      {"matmul_vector_batch", {4}, {2, 4, 3}},
      {"matmul_row", {1, 5}, {5, 1}},
      {"matmul_outer", {4, 1}, {1, 3}},
      {"matmul_batches_of_two_axes", {2, 2, 1, 3}, {2, 2, 3, 2}},
  };
  for (const Product& p : table) {
    OpCase c{p.name, [](const Tensors& t) { return matmul(t[0], t[1]); }, {{p.a}, {p.b}}};
    c.reference = [](const Arrays& a) { return reference::matmul(a[0], a[1]); };
    cases.push_back(c);
  }
  cases.back().edges = {{{0, 3}, {3, 2}}, {{2, 0}, {0, 3}}, {{2, 3}, {3, 0}},      {{0, 2, 3}, {3, 2}},
                        {{1, 1}, {1, 1}}, {{0}, {0}},       {{2, 2, 0}, {2, 0, 2}}};

  const Reference with_bias = [](const Arrays& a) {
    const Array transposed = reference::build({a[1].size(1), a[1].size(0)}, [&](const Dims& i) {
      return a[1]({i[1], i[0]});
    });
    const Array y = reference::matmul(a[0], transposed);
    return a.size() < 3 ? y : reference::map(y, a[2], [](double v, double b) { return v + b; });
  };
  cases.push_back({"linear",
                   [](const Tensors& t) { return linear(t[0], t[1], t[2]); },
                   {{{3, 4}}, {{2, 4}}, {{2}}},
                   with_bias,
                   {{{0, 4}, {2, 4}, {2}}, {{4}, {2, 4}, {2}}, {{1, 1}, {1, 1}, {1}}}});
  cases.push_back(
      {"linear_batched", [](const Tensors& t) { return linear(t[0], t[1]); }, {{{2, 2, 3}}, {{4, 3}}}, with_bias});
}

/// Computes attention by its definition. `visible` takes the index of a score and returns false if its key is masked.
/// `bias` may be null.
Array attention(const Array& q, const Array& k, const Array& v, double scale, const Array* bias,
                const std::function<bool(const Dims& score)>& visible) {
  const int64_t last = k.shape.size() - 1;
  const auto transposed = [last](Dims d) {
    std::swap(d[last], d[last - 1]);
    return d;
  };
  const Array k_transposed = reference::build(transposed(k.shape), [&](const Dims& i) { return k(transposed(i)); });
  const Array products = reference::matmul(q, k_transposed);
  const Array weights = reference::build(products.shape, [&](const Dims& i) {
    if (!visible(i)) return 0.0;
    return std::exp(products(i) * scale + (bias ? reference::broadcast(*bias, i) : 0.0));
  });
  const Array totals = reference::reduce(weights, {weights.shape.size() - 1}, true, reference::sum);
  return reference::matmul(reference::map(weights, totals, [](double w, double t) { return t > 0 ? w / t : 0; }), v);
}

void add_attention(std::vector<OpCase>& cases) {
  const std::vector<Input> inputs{{{2, 3, 4}}, {{2, 5, 4}}, {{2, 5, 2}}};
  const auto all = [](const Dims&) { return true; };
  const auto add = [&](OpCase c) {
    c.roundings = 4;
    c.tolerance = 3e-5;
    cases.push_back(std::move(c));
  };
  add({"attention",
       [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2]); },
       inputs,
       [=](const Arrays& a) { return attention(a[0], a[1], a[2], 0.5, nullptr, all); },
       {{{0, 3, 4}, {0, 5, 4}, {0, 5, 2}}, {{1, 1, 4}, {1, 1, 4}, {1, 1, 1}}, {{2, 0, 4}, {2, 5, 4}, {2, 5, 2}}}});
  add({"attention_scale",
       [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, false, 0.3); },
       {{{3, 4}}, {{5, 4}}, {{5, 2}}},
       [=](const Arrays& a) { return attention(a[0], a[1], a[2], 0.3, nullptr, all); }});
  add({"attention_causal", [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true); },
       inputs,
       [](const Arrays& a) {
         return attention(a[0], a[1], a[2], 0.5, nullptr, [](const Dims& i) { return i[2] <= i[1]; });
       }});
  add({"attention_bias",
       [](const Tensors& t) { return scaled_dot_product_attention(t[0], t[1], t[2], t[3]); },
       {inputs[0], inputs[1], inputs[2], {{3, 5}}},
       [=](const Arrays& a) { return attention(a[0], a[1], a[2], 0.5, &a[3], all); }});
  // The mask excludes all keys of the second query, so the result and the gradients of this query are zero.
  const auto is_visible = [](int64_t row, int64_t column) { return row != 1 && (row + column) % 2 == 0; };
  add({"attention_mask",
       [=](const Tensors& t) {
         std::vector<uint8_t> mask;
         for (int64_t i = 0; i < 15; ++i) mask.push_back(is_visible(i / 5, i % 5));
         const Tensor visible = from_span<uint8_t>(mask, {3, 5}, t[0].device()).to(b8);
         return scaled_dot_product_attention(t[0], t[1], t[2], visible);
       },
       inputs,
       [=](const Arrays& a) {
         return attention(a[0], a[1], a[2], 0.5, nullptr, [=](const Dims& i) { return is_visible(i[1], i[2]); });
       }});
}

struct LossForm {
  const char* suffix;
  Reduction reduction;

  Array reduced(const Array& losses) const {
    if (reduction == Reduction::none) return losses;
    return reference::reduce(losses, {}, false, reduction == Reduction::sum ? reference::sum : reference::mean);
  }
};
constexpr LossForm kLossForms[] = {{"_mean", Reduction::mean}, {"_sum", Reduction::sum}, {"_none", Reduction::none}};

void add_losses(std::vector<OpCase>& cases) {
  struct Loss {
    const char* name;
    Tensor (*function)(const Tensor&, const Tensor&, Reduction);
    double (*formula)(double, double);
    Domain input = Domain::any;
    Domain target = Domain::any;
  };
  const Loss table[] = {
      {"mse_loss", mse_loss, [](double x, double t) { return (x - t) * (x - t); }},
      {"l1_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return l1_loss(x, t + 0.25, r); },
       [](double x, double t) { return std::fabs(x - t - 0.25); }, Domain::integers, Domain::integers},
      {"smooth_l1_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return smooth_l1_loss(x, t, r, 0.7); },
       [](double x, double t) {
         const double d = std::fabs(x - t);
         return d < 0.7 ? d * d / 1.4 : d - 0.35;
       }},
      {"smooth_l1_loss_beta_zero",
       [](const Tensor& x, const Tensor& t, Reduction r) { return smooth_l1_loss(x, t + 0.25, r, 0); },
       [](double x, double t) { return std::fabs(x - t - 0.25); }, Domain::integers, Domain::integers},
      {"bce_with_logits",
       [](const Tensor& x, const Tensor& t, Reduction r) { return binary_cross_entropy_with_logits(x, t, r); },
       [](double x, double t) {
         const double p = 1 / (1 + std::exp(-x));
         return -t * std::log(p) - (1 - t) * std::log(1 - p);
       },
       Domain::any, Domain::unit},
  };
  for (const LossForm& form : kLossForms)
    for (const Loss& loss : table) {
      OpCase c{std::string(loss.name) + form.suffix,
               [=](const Tensors& t) { return loss.function(t[0], t[1], form.reduction); },
               {{{2, 3, 2}, loss.input}, {{2, 3, 2}, loss.target}}};
      c.reference = [=](const Arrays& a) { return form.reduced(reference::map(a[0], a[1], loss.formula)); };
      c.edges = {{{1, 1}, {1, 1}}, {Shape{}, Shape{}}};
      if (form.reduction != Reduction::mean) c.edges.push_back({{0, 2}, {0, 2}});
      cases.push_back(c);
    }
  for (const LossForm& form : kLossForms) {
    OpCase c{concat("bce_with_logits_pos_weight", form.suffix),
             [=](const Tensors& t) { return binary_cross_entropy_with_logits(t[0], t[1], form.reduction, t[2]); },
             {{{2, 3, 2}}, {{2, 3, 2}, Domain::unit}, {{3, 1}, Domain::positive}}};
    c.reference = [=](const Arrays& a) {
      return form.reduced(reference::build(a[0].shape, [&](const Dims& i) {
        const double p = 1 / (1 + std::exp(-a[0](i))), t = a[1](i);
        return -reference::broadcast(a[2], i) * t * std::log(p) - (1 - t) * std::log(1 - p);
      }));
    };
    cases.push_back(c);
  }
}

}  // namespace

void add_reduction_cases(std::vector<OpCase>& cases) {
  add_reductions(cases);
  add_other_reductions(cases);
  add_softmax(cases);
  add_linalg(cases);
  add_attention(cases);
  add_losses(cases);
}

}  // namespace voxgrad::optest
