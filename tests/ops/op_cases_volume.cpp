// Cases of normalization, pooling and interpolation of volumes.
#include <cmath>

#include "ops/fused.h"
#include "ops/norm.h"
#include "ops/pool.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

void add_norms(std::vector<OpCase>& cases) {
  const auto add = [&](OpCase c, std::vector<std::vector<Shape>> edges) {
    c.edges = std::move(edges);
    c.keeps_layout = c.inputs[0].shape.size() == 5;
    c.tolerance = 3e-5;
    cases.push_back(std::move(c));
  };
  add({"group_norm",
       [](const Tensors& t) { return group_norm(t[0], 2, t[1], t[2]); },
       {{{2, 4, 2, 1, 3}}, {{4}}, {{4}}},
       [](const Arrays& a) { return reference::group_norm(a[0], 2, &a[1], &a[2], 1e-5); }},
      {{{0, 4, 2, 1, 3}, {4}, {4}}, {{1, 2, 3}, {2}, {2}}, {{3, 6}, {6}, {6}}, {{2, 4, 0}, {4}, {4}}});
  add({"group_norm_one_group",
       [](const Tensors& t) { return group_norm(t[0], 1, t[1], t[2], 0.1); },
       {{{2, 3, 2, 2}}, {{3}}, {{3}}},
       [](const Arrays& a) { return reference::group_norm(a[0], 1, &a[1], &a[2], 0.1); }},
      {});
  add({"group_norm_plain",
       [](const Tensors& t) { return group_norm(t[0], 3); },
       {{{2, 3, 4}}},
       [](const Arrays& a) { return reference::group_norm(a[0], 3, nullptr, nullptr, 1e-5); }},
      {});
  add({"group_norm_weight_only",
       [](const Tensors& t) { return group_norm(t[0], 2, t[1]); },
       {{{2, 4, 3}}, {{4}}},
       [](const Arrays& a) { return reference::group_norm(a[0], 2, &a[1], nullptr, 1e-5); }},
      {});
  add({"group_norm_bias_only",
       [](const Tensors& t) { return group_norm(t[0], 2, {}, t[1]); },
       {{{2, 4, 3}}, {{4}}},
       [](const Arrays& a) { return reference::group_norm(a[0], 2, nullptr, &a[1], 1e-5); }},
      {});
  add({"instance_norm",
       [](const Tensors& t) { return instance_norm(t[0], t[1], t[2]); },
       {{{2, 2, 2, 3, 1}}, {{2}}, {{2}}},
       [](const Arrays& a) { return reference::group_norm(a[0], a[0].size(1), &a[1], &a[2], 1e-5); }},
      {{{0, 2, 2, 3, 1}, {2}, {2}}});
  add({"layer_norm",
       [](const Tensors& t) { return layer_norm(t[0], {5}, t[1], t[2]); },
       {{{3, 2, 5}}, {{5}}, {{5}}},
       [](const Arrays& a) { return reference::layer_norm(a[0], 1, &a[1], &a[2], 1e-5); }},
      {{{0, 2, 5}, {5}, {5}}, {{5}, {5}, {5}}});
  add({"layer_norm_two_axes",
       [](const Tensors& t) {
         return layer_norm(t[0], {2, 3}, t[1]);
       },
       {{{3, 2, 3}}, {{2, 3}}},
       [](const Arrays& a) { return reference::layer_norm(a[0], 2, &a[1], nullptr, 1e-5); }},
      {});
  add({"layer_norm_plain",
       [](const Tensors& t) { return layer_norm(t[0], {4}, {}, {}, 1e-3); },
       {{{3, 4}}},
       [](const Arrays& a) { return reference::layer_norm(a[0], 1, nullptr, nullptr, 1e-3); }},
      {});
}

/// Computes x / sqrt(mean(x^2) + eps) over the last `axes` axes, times weight unless weight is null.
Array rms_norm_reference(const Array& x, int64_t axes, const Array* weight, double eps) {
  Dims last;
  for (int64_t i = x.shape.size() - axes; i < x.shape.size(); ++i) last.push_back(i);
  const Array squares = reference::map(x, x, [](double a, double b) { return a * b; });
  const Array means = reference::reduce(squares, last, true, reference::mean);
  const Array y = reference::map(x, means, [=](double v, double m) { return v / std::sqrt(m + eps); });
  return weight ? reference::map(y, *weight, [](double v, double w) { return v * w; }) : y;
}

void add_rms_norms(std::vector<OpCase>& cases) {
  cases.push_back({"rms_norm",
                   [](const Tensors& t) { return rms_norm(t[0], {5}, t[1], 1e-3); },
                   {{{2, 3, 5}}, {{5}}},
                   [](const Arrays& a) { return rms_norm_reference(a[0], 1, &a[1], 1e-3); },
                   {{{0, 3, 5}, {5}}, {{1, 1, 5}, {5}}}});
  cases.push_back({"rms_norm_two_axes",
                   [](const Tensors& t) {
                     return rms_norm(t[0], {2, 3}, {}, 0.1);
                   },
                   {{{4, 2, 3}}},
                   [](const Arrays& a) { return rms_norm_reference(a[0], 2, nullptr, 0.1); }});
}

/// Computes batch normalization by its definition. Without `mean` and `var`, the statistics are taken over all axes
/// except axis 1.
Array batch_norm_reference(const Array& x, const Array* weight, const Array* bias, double eps, const Array* mean = {},
                           const Array* var = {}) {
  Dims axes{0};
  for (int64_t i = 2; i < x.shape.size(); ++i) axes.push_back(i);
  const auto at = [](const Array& a, const Dims& i) { return a.values[static_cast<size_t>(i[1])]; };
  const Array means = mean ? *mean : reference::reduce(x, axes, false, reference::mean);
  const Array centered = reference::build(x.shape, [&](const Dims& i) { return x(i) - at(means, i); });
  const Array variances =
      var ? *var
          : reference::reduce(reference::map(centered, centered, [](double a, double b) { return a * b; }), axes, false,
                              reference::mean);
  return reference::build(x.shape, [&](const Dims& i) {
    return centered(i) / std::sqrt(at(variances, i) + eps) * (weight ? at(*weight, i) : 1) + (bias ? at(*bias, i) : 0);
  });
}

/// Returns a case of a norm and an activation with a residual in between, which is one more input.
OpCase with_residual(OpCase c, NormKind norm, ActivationKind activation, double (*value)(double)) {
  c.name += "_residual";
  c.roundings = 3;  // with some activations, the results of the norm and of the addition are rounded, too
  c.inputs.push_back(c.inputs[0]);
  for (std::vector<Shape>& shapes : c.edges) shapes.push_back(shapes[0]);
  c.function = [=](const Tensors& t) {
    return norm_activation(t[0],
                           {.norm = {norm, t[1], t[2], 0.1, 2}, .activation = {activation, 0.25}, .residual = t[3]});
  };
  c.reference = [=](const Arrays& a) {
    const Array y = norm == NormKind::batch
                        ? batch_norm_reference(a[0], &a[1], &a[2], 0.1)
                        : reference::group_norm(a[0], norm == NormKind::group ? 2 : 4, &a[1], &a[2], 0.1);
    return reference::map(reference::map(y, a[3], [](double u, double r) { return u + r; }), value);
  };
  return c;
}

/// Adds norms with an activation before or after the norm.
void add_norm_activations(std::vector<OpCase>& cases) {
  struct Function {
    const char* name;
    ActivationKind kind;
    double (*value)(double);
  };
  const Function functions[] = {
      {"relu", ActivationKind::relu, [](double v) { return v > 0 ? v : 0; }},
      {"leaky_relu", ActivationKind::leaky_relu, [](double v) { return v > 0 ? v : 0.25 * v; }},
      {"gelu", ActivationKind::gelu, [](double v) { return v * 0.5 * (1 + std::erf(v * std::sqrt(0.5))); }},
      {"silu", ActivationKind::silu, [](double v) { return v / (1 + std::exp(-v)); }}};
  struct Norm {
    const char* name;
    NormKind kind;
  };
  const Norm norms[] = {
      {"group_norm", NormKind::group}, {"instance_norm", NormKind::instance}, {"batch_norm", NormKind::batch}};
  for (const Function& f : functions)
    for (const Norm& norm : norms)
      for (const bool first : {false, true}) {
        const NormKind kind = norm.kind;
        OpCase c{concat(first ? f.name : norm.name, '_', first ? norm.name : f.name),
                 [=](const Tensors& t) {
                   return norm_activation(t[0], {{kind, t[1], t[2], 0.1, 2}, {f.kind, 0.25}, first});
                 },
                 {{{2, 4, 2, 3, 2}, Domain::nonzero}, {{4}}, {{4}}}};
        c.reference = [=](const Arrays& a) {
          const Array x = first ? reference::map(a[0], f.value) : a[0];
          const Array y = kind == NormKind::batch
                              ? batch_norm_reference(x, &a[1], &a[2], 0.1)
                              : reference::group_norm(x, kind == NormKind::group ? 2 : 4, &a[1], &a[2], 0.1);
          return first ? y : reference::map(y, f.value);
        };
        c.edges = {{{0, 4, 2, 3, 1}, {4}, {4}}, {{2, 4, 0}, {4}, {4}}, {{1, 4, 5}, {4}, {4}}};
        c.keeps_layout = true;
        c.tolerance = 3e-5;
        cases.push_back(c);
        if (!first) cases.push_back(with_residual(std::move(c), kind, f.kind, f.value));
      }
}

void add_batch_norms(std::vector<OpCase>& cases) {
  const auto add = [&](OpCase c, std::vector<std::vector<Shape>> edges) {
    c.edges = std::move(edges);
    c.keeps_layout = c.inputs[0].shape.size() == 5;
    c.tolerance = 3e-5;
    cases.push_back(std::move(c));
  };
  add({"batch_norm",
       [](const Tensors& t) { return batch_norm(t[0], {}, {}, t[1], t[2], true, 0.1, 1e-3); },
       {{{3, 4, 2, 1, 3}}, {{4}}, {{4}}},
       [](const Arrays& a) { return batch_norm_reference(a[0], &a[1], &a[2], 1e-3); }},
      {{{0, 4, 2, 1, 3}, {4}, {4}}, {{1, 2, 3}, {2}, {2}}, {{3, 6}, {6}, {6}}, {{2, 4, 0}, {4}, {4}}});
  add({"batch_norm_plain",
       [](const Tensors& t) { return batch_norm(t[0], {}, {}, {}, {}, true); },
       {{{5, 3}}},
       [](const Arrays& a) { return batch_norm_reference(a[0], nullptr, nullptr, 1e-5); }},
      {});
  add({"batch_norm_weight_only",
       [](const Tensors& t) { return batch_norm(t[0], {}, {}, t[1], {}, true); },
       {{{2, 16, 5}}, {{16}}},
       [](const Arrays& a) { return batch_norm_reference(a[0], &a[1], nullptr, 1e-5); }},
      {});
  const Input statistic{{4}, Domain::positive, 0, false};
  add({"batch_norm_eval",
       [](const Tensors& t) { return batch_norm(t[0], t[1], t[2], t[3], t[4]); },
       {{{3, 4, 2, 1, 3}}, statistic, statistic, {{4}}, {{4}}},
       [](const Arrays& a) { return batch_norm_reference(a[0], &a[3], &a[4], 1e-5, &a[1], &a[2]); }},
      {{{0, 4, 2, 1, 3}, {4}, {4}, {4}, {4}}, {{1, 4}, {4}, {4}, {4}, {4}}});
  add({"batch_norm_eval_plain",
       [](const Tensors& t) { return batch_norm(t[0], t[1], t[2], {}, {}, false, 0.1, 0.2); },
       {{{2, 4, 3}}, statistic, statistic},
       [](const Arrays& a) { return batch_norm_reference(a[0], nullptr, nullptr, 0.2, &a[1], &a[2]); }},
      {});
}

void add_max_pools(std::vector<OpCase>& cases) {
  const std::pair<const char*, MaxPoolOptions<3>> table[] = {
      {"", {.kernel_size = 2}},
      {"_per_axis", {.kernel_size = {2, 3, 1}, .stride = Triple{1, 2, 3}, .padding = {1, 1, 0}}},
      {"_dilated", {.kernel_size = {2, 2, 3}, .stride = Triple{1, 2, 1}, .padding = {0, 1, 0}, .dilation = {3, 2, 2}}},
      {"_ceil", {.kernel_size = {2, 3, 2}, .stride = Triple{2, 2, 3}, .padding = {0, 1, 1}, .ceil_mode = true}},
      {"_overlapping", {.kernel_size = 3, .stride = Triple{1}}},
  };
  for (const auto& [suffix, options] : table) {
    OpCase c{std::string("max_pool3d") + suffix,
             [o = options](const Tensors& t) { return max_pool3d(t[0], o); },
             {{{1, 2, 4, 5, 5}, Domain::distinct}}};
    c.reference = [o = options](const Arrays& a) { return reference::max_pool(a[0], o, false); };
    c.edges = {{{0, 2, 4, 5, 5}}};
    c.keeps_layout = true;
    cases.push_back(c);
    c.name += "_indices";
    c.function = [o = options](const Tensors& t) { return max_pool3d_with_indices(t[0], o).indices; };
    c.reference = [o = options](const Arrays& a) { return reference::max_pool(a[0], o, true); };
    c.differentiable = false;
    cases.push_back(c);
    c.name += "_of_ties";
    c.inputs[0].domain = Domain::ties;
    cases.push_back(c);
  }
  OpCase unbatched{"max_pool3d_unbatched",
                   [](const Tensors& t) { return max_pool3d(t[0], {.kernel_size = 2}); },
                   {{{2, 4, 2, 3}, Domain::distinct}}};
  unbatched.reference = [](const Arrays& a) {
    return reference::reshaped(
        reference::max_pool(reference::reshaped(a[0], {1, 2, 4, 2, 3}), {.kernel_size = 2}, false), {2, 2, 1, 1});
  };
  cases.push_back(unbatched);
}

void add_average_pools(std::vector<OpCase>& cases) {
  const Triple k232{2, 3, 2};
  const std::pair<const char*, AvgPoolOptions<3>> table[] = {
      {"", {.kernel_size = 2}},
      {"_padded", {.kernel_size = k232, .stride = Triple{1, 2, 2}, .padding = {1, 1, 0}}},
      {"_not_counting_padding",
       {.kernel_size = k232, .stride = Triple{2, 1, 2}, .padding = {1, 1, 1}, .count_include_pad = false}},
      {"_ceil", {.kernel_size = k232, .stride = Triple{2, 2, 3}, .padding = {0, 1, 1}, .ceil_mode = true}},
      {"_ceil_not_counting",
       {.kernel_size = k232,
        .stride = Triple{3, 2, 2},
        .padding = {1, 0, 1},
        .ceil_mode = true,
        .count_include_pad = false}},
      {"_divisor", {.kernel_size = k232, .padding = {1, 1, 1}, .ceil_mode = true, .divisor_override = 5}},
      {"_negative_divisor", {.kernel_size = 2, .stride = Triple{1}, .divisor_override = -3}},
  };
  for (const auto& [suffix, options] : table) {
    OpCase c{std::string("avg_pool3d") + suffix,
             [o = options](const Tensors& t) { return avg_pool3d(t[0], o); },
             {{{1, 2, 4, 5, 3}}}};
    c.reference = [o = options](const Arrays& a) { return reference::avg_pool(a[0], o); };
    c.edges = {{{0, 2, 4, 5, 3}}};
    c.keeps_layout = true;
    cases.push_back(c);
  }
}

void add_interpolations(std::vector<OpCase>& cases) {
  constexpr auto kTrilinear = InterpolateMode::trilinear;
  const std::pair<const char*, InterpolateOptions> table[] = {
      {"nearest_size", {.size = Triple{5, 3, 2}}},
      {"nearest_x2", {.scale_factor = 2}},
      {"nearest_down", {.size = Triple{1, 2, 2}}},
      {"nearest_scale", {.scale_factor = 1.7}},
      {"nearest_half", {.scale_factor = 0.5}},
      {"nearest_exact_size", {.size = Triple{5, 2, 3}, .mode = InterpolateMode::nearest_exact}},
      {"nearest_exact_scale", {.scale_factor = 1.7, .mode = InterpolateMode::nearest_exact}},
      {"nearest_scales", {.scale_factor = ScaleFactor(2, 1, 1.7)}},
      {"trilinear_size", {.size = Triple{5, 3, 2}, .mode = kTrilinear}},
      {"trilinear_x2", {.scale_factor = 2, .mode = kTrilinear}},
      {"trilinear_scale", {.scale_factor = 1.7, .mode = kTrilinear}},
      {"trilinear_down", {.size = Triple{1, 2, 2}, .mode = kTrilinear}},
      {"trilinear_same", {.size = Triple{2, 3, 4}, .mode = kTrilinear}},
      {"trilinear_scale_rounded_away", {.scale_factor = 1.3, .mode = kTrilinear}},
      {"trilinear_scales", {.scale_factor = ScaleFactor(1, 2.5, 1.3), .mode = kTrilinear}},
      {"trilinear_half", {.scale_factor = 0.6, .mode = kTrilinear}},
      {"trilinear_aligned", {.size = Triple{3, 1, 7}, .mode = kTrilinear, .align_corners = true}},
      {"trilinear_aligned_scale", {.scale_factor = 1.7, .mode = kTrilinear, .align_corners = true}},
  };
  for (const auto& [suffix, options] : table) {
    OpCase c{std::string("interpolate_") + suffix,
             [o = options](const Tensors& t) { return interpolate(t[0], o); },
             {{{1, 2, 2, 3, 4}}}};
    c.reference = [o = options](const Arrays& a) { return reference::interpolate(a[0], o); };
    c.edges = {{{0, 2, 2, 3, 4}}};
    if (options.size || (*options.scale_factor)[0] >= 1) c.edges.push_back({{1, 1, 1, 1, 1}});
    c.keeps_layout = true;
    cases.push_back(c);
  }
}

}  // namespace

void add_volume_cases(std::vector<OpCase>& cases) {
  add_norms(cases);
  add_rms_norms(cases);
  add_norm_activations(cases);
  add_batch_norms(cases);
  add_max_pools(cases);
  add_average_pools(cases);
  add_interpolations(cases);
}

}  // namespace voxgrad::optest
