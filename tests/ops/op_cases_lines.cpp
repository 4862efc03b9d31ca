// Cases of operators along an axis (cumulative sums, sort, topk, max, min, argmax and argmin), and of prelu.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/sort.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

using List = std::vector<double>;

/// Applies f to each line of elements along `axis`. The result of f replaces the line and may have a different length.
Array along(const Array& x, int64_t axis, const std::function<List(const List&)>& f) {
  axis = normalize_axis(axis, x.shape.size(), "along");
  Shape shape = x.shape;
  shape[axis] = static_cast<int64_t>(f(List(static_cast<size_t>(x.size(axis)))).size());
  return reference::build(shape, [&](const Dims& index) {
    List line;
    for (Dims at = index; static_cast<int64_t>(line.size()) < x.size(axis);) {
      at[axis] = static_cast<int64_t>(line.size());
      line.push_back(x(at));
    }
    return f(line)[static_cast<size_t>(index[axis])];
  });
}

/// Returns the indices that sort `line`. The sort is stable.
List argsort(const List& line, bool descending) {
  List indices(line.size());
  std::iota(indices.begin(), indices.end(), 0.0);
  const auto value = [&](double index) { return line[static_cast<size_t>(index)]; };
  std::stable_sort(indices.begin(), indices.end(),
                   [&](double a, double b) { return descending ? value(a) > value(b) : value(a) < value(b); });
  return indices;
}
/// Returns the elements of `line` at `indices`.
List take(const List& line, List indices) {
  for (double& index : indices) index = line[static_cast<size_t>(index)];
  return indices;
}
/// Returns the first `count` elements of `list`.
List prefix(List list, size_t count) {
  list.resize(count);
  return list;
}

void add_sums(std::vector<OpCase>& cases) {
  const auto sums = [](const List& line) {
    List result(line.size());
    std::partial_sum(line.begin(), line.end(), result.begin());
    return result;
  };
  for (const int64_t axis : {0, 1, -1}) {
    OpCase c{concat("cumsum_axis_", axis < 0 ? "last" : concat(axis)),
             [=](const Tensors& t) { return cumsum(t[0], axis); },
             {{{2, 5, 3}}},
             [=](const Arrays& a) { return along(a[0], axis, sums); }};
    c.edges = {{{1, 1, 1}}, {{0, 0, 0}}, {{2, 0, 3}}};
    c.keeps_layout = true;
    cases.push_back(c);
  }
  OpCase whole{"cumsum_of_bools",
               [](const Tensors& t) { return t[0].cumsum(-2); },
               {{{5, 3}, Domain::boolean}},
               [=](const Arrays& a) { return along(a[0], 0, sums); }};
  whole.differentiable = false;
  cases.push_back(whole);
}

void add_sorts(std::vector<OpCase>& cases) {
  struct Form {
    const char* name;
    Selection (*function)(const Tensor&, int64_t);
    List (*indices)(const List&);
    bool keeps_layout = true;
  };
  const Form forms[] = {
      {"sort", [](const Tensor& x, int64_t axis) { return sort(x, axis); },
       [](const List& v) { return argsort(v, false); }},
      {"sort_descending", [](const Tensor& x, int64_t axis) { return sort(x, axis, true); },
       [](const List& v) { return argsort(v, true); }},
      {"topk", [](const Tensor& x, int64_t axis) { return topk(x, 2, axis); },
       [](const List& v) { return prefix(argsort(v, true), 2); }},
      {"topk_smallest", [](const Tensor& x, int64_t axis) { return topk(x, 2, axis, false); },
       [](const List& v) { return prefix(argsort(v, false), 2); }},
      {"max", [](const Tensor& x, int64_t axis) { return max(x, axis, true); },
       [](const List& v) { return prefix(argsort(v, true), 1); }, false},
      {"min", [](const Tensor& x, int64_t axis) { return min(x, axis, true); },
       [](const List& v) { return prefix(argsort(v, false), 1); }, false},
  };
  for (const Form& form : forms)
    for (const int64_t axis : {0, 1, -1}) {
      const std::string name = concat(form.name, "_axis_", axis < 0 ? "last" : concat(axis));
      OpCase values{
          name, [=](const Tensors& t) { return form.function(t[0], axis).values; }, {{{3, 4, 2}, Domain::distinct}}};
      values.reference = [=](const Arrays& a) {
        return along(a[0], axis, [=](const List& v) { return take(v, form.indices(v)); });
      };
      values.keeps_layout = form.keeps_layout;
      values.edges = {{{2, 2, 2}}, {{3, 0, 2}}};
      if (axis == 1) values.edges.back() = {{0, 2, 2}};
      cases.push_back(values);
      OpCase indices{name + "_indices",
                     [=](const Tensors& t) { return form.function(t[0], axis).indices; },
                     {{{3, 9, 3}, Domain::ties}}};
      indices.reference = [=](const Arrays& a) { return along(a[0], axis, form.indices); };
      indices.differentiable = false;
      indices.exact = true;
      cases.push_back(indices);
    }
}

void add_arg_reductions(std::vector<OpCase>& cases) {
  const auto position = [](bool largest) { return [=](const List& v) { return argsort(v, largest)[0]; }; };
  for (const bool largest : {true, false}) {
    const std::string name = largest ? "argmax" : "argmin";
    const auto function = largest ? argmax : argmin;
    OpCase whole{name + "_all",
                 [=](const Tensors& t) { return function(t[0], {}, false); },
                 {{{3, 4, 2, 5}, Domain::ties}},
                 [=](const Arrays& a) { return reference::reduce(a[0], {}, false, position(largest)); }};
    whole.differentiable = false;
    whole.exact = true;
    cases.push_back(whole);
    OpCase classes{name + "_of_classes",
                   [=](const Tensors& t) { return function(t[0], 1, false); },
                   {{{2, 4, 3, 2, 5}, Domain::ties}},
                   [=](const Arrays& a) { return reference::reduce(a[0], {1}, false, position(largest)); }};
    classes.differentiable = false;
    classes.exact = true;
    classes.edges = {{{1, 1, 1, 1, 1}}, {{0, 3, 2, 0, 1}}};
    cases.push_back(classes);
  }
}

void add_prelu(std::vector<OpCase>& cases) {
  for (const int64_t weights : {1, 3}) {
    OpCase c{concat("prelu_", weights),
             [](const Tensors& t) { return prelu(t[0], t[1]); },
             {{{2, 3, 2, 2}, Domain::nonzero}, {{weights}}}};
    c.reference = [](const Arrays& a) {
      const Array weight = reference::reshaped(a[1], {a[1].size(0), 1, 1});
      return reference::map(a[0], weight, [](double x, double w) { return x > 0 ? x : w * x; });
    };
    c.edges = {{{1, 1, 1, 1}, {1}}, {{0, 3, 2, 2}, {3}}};
    c.keeps_layout = true;
    cases.push_back(c);
  }
}

}  // namespace

void add_line_cases(std::vector<OpCase>& cases) {
  add_sums(cases);
  add_sorts(cases);
  add_arg_reductions(cases);
  add_prelu(cases);
}

}  // namespace voxgrad::optest
