// Cases of views, rearrangements and indexing. Most references compute the input position of each output element.
#include "ops/elementwise.h"
#include "ops/pixel_shuffle.h"
#include "ops/shape.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

using reference::build;
using reference::reshaped;

/// Returns a case whose result has the fixed `shape`. from(inputs, index) returns the element at `index`.
OpCase element_case(const char* name, Function function, std::vector<Input> inputs, const Shape& shape,
                    std::function<double(const Arrays&, const Dims&)> from) {
  return {name, std::move(function), std::move(inputs),
          [=](const Arrays& a) { return build(shape, [&](const Dims& i) { return from(a, i); }); }};
}

/// Returns a case whose result has the elements of the input in the same order.
OpCase reshape_case(const char* name, Function function, const Shape& from, const Shape& to) {
  return {name, std::move(function), {{from}}, [=](const Arrays& a) { return reshaped(a[0], to); }};
}

void add_views(std::vector<OpCase>& cases) {
  cases.push_back(reshape_case("reshape", [](const Tensors& t) { return reshape(t[0], {3, -1}); }, {2, 3, 2}, {3, 4}));
  cases.back().edges = {{{0, 3}}, {{1, 3, 1}}};
  cases.back().reference = [](const Arrays& a) { return reshaped(a[0], {3, numel(a[0].shape) / 3}); };
  cases.push_back(reshape_case("view",
                               [](const Tensors& t) {
                                 return view(t[0].contiguous(), {4, 3});
                               },
                               {2, 3, 2}, {4, 3}));
  cases.push_back(
      reshape_case("flatten", [](const Tensors& t) { return flatten(t[0], 1, 2); }, {2, 3, 2, 2}, {2, 6, 2}));
  cases.push_back(reshape_case("flatten_all", [](const Tensors& t) { return flatten(t[0]); }, {2, 3, 2}, {12}));
  cases.push_back(reshape_case("squeeze", [](const Tensors& t) { return squeeze(t[0], -2); }, {3, 1, 2}, {3, 2}));
  cases.push_back(
      reshape_case("squeeze_nothing", [](const Tensors& t) { return squeeze(t[0], 0) * 1.0; }, {3, 2}, {3, 2}));
  cases.push_back(reshape_case("squeeze_all", [](const Tensors& t) { return squeeze(t[0]); }, {1, 3, 1, 2}, {3, 2}));
  cases.push_back(reshape_case("unsqueeze", [](const Tensors& t) { return unsqueeze(t[0], -1); }, {3, 2}, {3, 2, 1}));
  cases.push_back(element_case(
      "permute",
      [](const Tensors& t) {
        return permute(t[0], {2, 0, -2});
      },
      {{{2, 3, 4}}}, {4, 2, 3},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[1], i[2], i[0]});
      }));
  cases.push_back(element_case(
      "transpose", [](const Tensors& t) { return transpose(t[0], 0, -1); }, {{{2, 3, 4}}}, {4, 3, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[2], i[1], i[0]});
      }));
  cases.push_back(element_case(
      "expand",
      [](const Tensors& t) {
        return expand(t[0], {2, -1, 3});
      },
      {{{2, 1}}}, {2, 2, 3},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[1], 0});
      }));
  cases.push_back(element_case(
      "reshape_of_transposed", [](const Tensors& t) { return reshape(transpose(t[0], 0, 1), {6}); }, {{{2, 3}}}, {6},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0] % 2, i[0] / 2});
      }));
}

void add_parts(std::vector<OpCase>& cases) {
  cases.push_back(element_case(
      "narrow", [](const Tensors& t) { return narrow(t[0], 1, 1, 2); }, {{{2, 4}}}, {2, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], i[1] + 1});
      }));
  cases.push_back(element_case(
      "narrow_to_nothing", [](const Tensors& t) { return narrow(t[0], 1, 4, 0); }, {{{2, 4}}}, {2, 0},
      [](const Arrays&, const Dims&) { return 0; }));
  cases.push_back(element_case(
      "slice", [](const Tensors& t) { return slice(t[0], 0, 1, 6, 2); }, {{{7, 2}}}, {3, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({1 + 2 * i[0], i[1]});
      }));
  cases.push_back(element_case(
      "slice_negative", [](const Tensors& t) { return slice(t[0], 1, -3, -1); }, {{{2, 4}}}, {2, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], i[1] + 1});
      }));
  cases.push_back(element_case(
      "slice_clipped", [](const Tensors& t) { return slice(t[0], 1, 2, 99, 3); }, {{{2, 7}}}, {2, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], 2 + 3 * i[1]});
      }));
  cases.push_back(element_case(
      "select", [](const Tensors& t) { return select(t[0], 1, -1); }, {{{2, 3, 2}}}, {2, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], 2, i[1]});
      }));
  cases.push_back(element_case(
      "flip",
      [](const Tensors& t) {
        return flip(t[0], {0, -1});
      },
      {{{2, 3, 4}}}, {2, 3, 4},
      [](const Arrays& a, const Dims& i) {
        return a[0]({1 - i[0], i[1], 3 - i[2]});
      }));
  cases.push_back(element_case(
      "pad",
      [](const Tensors& t) {
        return pad(t[0], {1, 2, 0, 1}, 0.5);
      },
      {{{2, 3}}}, {3, 6},
      [](const Arrays& a, const Dims& i) {
        const bool inside = i[0] < 2 && i[1] >= 1 && i[1] < 4;
        return inside ? a[0]({i[0], i[1] - 1}) : 0.5;
      }));
  cases.push_back(element_case(
      "pad_and_crop",
      [](const Tensors& t) {
        return pad(t[0], {-1, 2, 1, -1});
      },
      {{{3, 4}}}, {3, 5},
      [](const Arrays& a, const Dims& i) {
        const bool inside = i[0] >= 1 && i[1] < 3;
        return inside ? a[0]({i[0] - 1, i[1] + 1}) : 0.0;
      }));
}

/// Returns the input position of output element i when an axis of `size` is rolled by `shift`.
int64_t roll_source(int64_t i, int64_t shift, int64_t size) { return ((i - shift) % size + size) % size; }

void add_rolls(std::vector<OpCase>& cases) {
  const struct {
    const char* name;
    Axes shifts;
    Axes axes;
    int64_t total_shift[3];  // sum of the shifts of each axis
  } table[] = {{"roll", {1}, {1}, {0, 1, 0}},
               {"roll_axes", {-1, 7, 1}, {0, -1, -2}, {-1, 1, 7}},
               {"roll_one_axis_twice", {1, 3}, {2, 2}, {0, 0, 4}},
               {"roll_nothing", {4, 0}, {0, 1}, {4, 0, 0}}};
  for (const auto& row : table) {
    OpCase c{row.name,
             [=](const Tensors& t) { return roll(t[0], row.shifts, row.axes); },
             {{{4, 3, 5}}},
             [=](const Arrays& a) {
               return build(a[0].shape, [&](const Dims& i) {
                 Dims from = i;
                 for (int64_t axis = 0; axis < 3; ++axis)
                   from[axis] = roll_source(i[axis], row.total_shift[axis], a[0].size(axis));
                 return a[0](from);
               });
             }};
    c.edges = {{{0, 1, 2}}, {{1, 1, 1}}};
    cases.push_back(c);
  }
  cases.push_back({"roll_in_row_major_order", [](const Tensors& t) { return roll(t[0], 4); }, {{{2, 3, 1}}}});
  cases.back().reference = [](const Arrays& a) {
    Array out = a[0];
    for (size_t i = 0; i < out.values.size(); ++i)
      out.values[i] = a[0].values[static_cast<size_t>(roll_source(static_cast<int64_t>(i), 4, numel(out.shape)))];
    return out;
  };
  cases.back().edges = {{Shape{}}, {{2, 0}}};
}

void add_repeats(std::vector<OpCase>& cases) {
  const struct {
    const char* name;
    Shape shape;
    Dims repeats;
  } table[] = {{"repeat", {2, 1, 3}, {3, 4, 2}},
               {"repeat_once", {2, 3}, {1, 1}},
               {"repeat_in_front", {3}, {2, 1, 4}},
               {"repeat_of_five_axes", {1, 2, 1, 1, 2}, {2, 1, 3, 1, 2}},
               {"repeat_zero_times", {2, 3}, {2, 0}}};
  for (const auto& row : table) {
    OpCase c{row.name, [=](const Tensors& t) { return repeat(t[0], row.repeats); }, {{row.shape}}};
    c.reference = [=](const Arrays& a) {
      Shape shape = row.repeats;
      const int64_t lead = shape.size() - a[0].shape.size();
      for (int64_t axis = 0; axis < a[0].shape.size(); ++axis) shape[lead + axis] *= a[0].size(axis);
      return build(shape, [&](const Dims& i) {
        Dims from;
        for (int64_t axis = 0; axis < a[0].shape.size(); ++axis) from.push_back(i[lead + axis] % a[0].size(axis));
        return a[0](from);
      });
    };
    c.edges = {{Dims::filled(row.shape.size(), 1)}, {Dims::filled(row.shape.size(), 0)}};
    cases.push_back(c);
  }
  cases.push_back({"repeat_of_a_number", [](const Tensors& t) { return repeat(t[0], {2, 3}); }, {{Shape{}}}});
  cases.back().reference = [](const Arrays& a) { return build({2, 3}, [&](const Dims&) { return a[0].values[0]; }); };
}

void add_pixel_unshuffles(std::vector<OpCase>& cases) {
  const struct {
    const char* name;
    int64_t factor;
    Shape shape;
  } table[] = {{"pixel_unshuffle", 2, {2, 3, 4, 2, 6}},
               {"pixel_unshuffle_image", 3, {2, 2, 3, 6}},
               {"pixel_unshuffle_signal", 2, {1, 2, 8}},
               {"pixel_unshuffle_by_one", 1, {1, 2, 1, 2, 3}}};
  for (const auto& row : table) {
    const int64_t axes = row.shape.size() - 2, r = row.factor;
    OpCase c{row.name, [=](const Tensors& t) { return pixel_unshuffle(t[0], r); }, {{row.shape}}};
    c.reference = [=](const Arrays& a) {
      Shape shape = a[0].shape;
      for (int64_t i = 0; i < axes; ++i) {
        shape[1] *= r;
        shape[i + 2] /= r;
      }
      return build(shape, [&](const Dims& o) {
        Dims from = o;
        for (int64_t axis = axes + 1; axis > 1; --axis) {  // within a channel, the last axis varies fastest
          from[axis] = o[axis] * r + from[1] % r;
          from[1] /= r;
        }
        return a[0](from);
      });
    };
    Shape empty = row.shape;
    empty[0] = 0;
    c.edges = {{empty}};
    c.keeps_layout = axes > 1;
    cases.push_back(c);
  }
}

void add_splits(std::vector<OpCase>& cases) {
  // The parts are concatenated in a different order, so that a misplaced part changes the result.
  cases.push_back(element_case(
      "split_in_sizes",
      [](const Tensors& t) {
        const Tensors parts = split(t[0], {1, 0, 3}, -1);
        return cat({parts[2], parts[1], parts[0]}, 1);
      },
      {{{2, 4}}}, {2, 4},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], (i[1] + 1) % 4});
      }));
  cases.push_back(element_case(
      "split_in_twos",
      [](const Tensors& t) {
        const Tensors parts = t[0].split(2);
        return cat({parts[2], parts[1], parts[0]});
      },
      {{{5, 2}}}, {5, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0] == 0 ? 4 : i[0] < 3 ? i[0] + 1 : i[0] - 3, i[1]});
      }));
  cases.push_back(element_case(
      "chunk",
      [](const Tensors& t) {
        const Tensors parts = chunk(t[0], 4, 1);  // sizes 2, 2 and 1
        return cat({parts.at(2), parts[0], parts[1]}, 1);
      },
      {{{2, 5, 2}}}, {2, 5, 2},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], (i[1] + 4) % 5, i[2]});
      }));
}

void add_joins(std::vector<OpCase>& cases) {
  cases.push_back(element_case(
      "cat",
      [](const Tensors& t) {
        return cat({t[0], t[1], t[2]}, 1);
      },
      {{{2, 2}}, {{2, 3}}, {{2, 0}}}, {2, 5},
      [](const Arrays& a, const Dims& i) {
        return i[1] < 2 ? a[0](i) : a[1]({i[0], i[1] - 2});
      }));
  cases.push_back(element_case(
      "cat_with_itself",
      [](const Tensors& t) {
        return cat({t[0], t[0]}, -2);
      },
      {{{2, 3}}}, {4, 3},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0] % 2, i[1]});
      }));
  cases.push_back(element_case(
      "stack",
      [](const Tensors& t) {
        return stack({t[0], t[1]}, -1);
      },
      {{{2, 3}}, {{2, 3}}}, {2, 3, 2},
      [](const Arrays& a, const Dims& i) {
        return a[static_cast<size_t>(i[2])]({i[0], i[1]});
      }));
}

void add_indexing(std::vector<OpCase>& cases) {
  const auto at = [](double index) { return static_cast<int64_t>(index); };
  cases.push_back(element_case(
      "index_select", [](const Tensors& t) { return index_select(t[0], 1, t[1]); },
      {{{2, 3, 2}}, {{5}, Domain::index, 3}}, {2, 5, 2},
      [=](const Arrays& a, const Dims& i) {
        return a[0]({i[0], at(a[1]({i[1]})), i[2]});
      }));
  cases.push_back({"gather",
                   [](const Tensors& t) { return gather(t[0], 1, t[1]); },
                   {{{2, 3, 2}}, {{2, 4, 2}, Domain::index, 3}},
                   [=](const Arrays& a) {
                     return build(a[1].shape, [&](const Dims& i) { return a[0]({i[0], at(a[1](i)), i[2]}); });
                   }});
  cases.back().edges = {{{2, 3, 2}, {2, 0, 2}}, {{0, 3, 2}, {0, 4, 2}}};
  cases.push_back(element_case(
      "one_hot", [](const Tensors& t) { return one_hot(t[0], 4); }, {{{2, 3}, Domain::index, 4}}, {2, 3, 4},
      [](const Arrays& a, const Dims& i) {
        return a[0]({i[0], i[1]}) == static_cast<double>(i[2]);
      }));
  cases.back().differentiable = false;
  cases.push_back({"scatter_add",
                   [](const Tensors& t) { return scatter_add(t[0], 0, t[1], 3); },
                   {{{4, 2}}, {{4, 2}, Domain::index, 3}},
                   [=](const Arrays& a) {
                     Array out{{3, 2}, std::vector<double>(6)};
                     build(a[0].shape, [&](const Dims& i) { return out({at(a[1](i)), i[1]}) += a[0](i); });
                     return out;
                   }});
  cases.back().edges = {{{0, 2}, {0, 2}}};
}

}  // namespace

void add_shape_cases(std::vector<OpCase>& cases) {
  add_views(cases);
  add_parts(cases);
  add_rolls(cases);
  add_repeats(cases);
  add_pixel_unshuffles(cases);
  add_splits(cases);
  add_joins(cases);
  add_indexing(cases);
}

}  // namespace voxgrad::optest
