// Cases of convolutions, and of convolutions with fused ReLU and GroupNorm. Axis sizes differ where possible, so that
// exchanged axes are detected.
#include <cmath>

#include "ops/fused.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

const Triple kOne(1), kZero(0);

struct Geometry {
  const char* name;
  Shape x;
  Shape w;
  bool bias = true;
  Triple stride = kOne;
  Triple padding = kZero;
  Triple dilation = kOne;
  int64_t groups = 1;
  Triple output_padding = kZero;
  std::optional<Triple> output_size = {};
};

// With Ci input channels, Co output channels and kernel size k..., the weight has the shape (Co, Ci / groups, k...) for
// conv and (Ci, Co / groups, k...) for conv_transpose. In the names, k is the kernel size, s the stride, p the padding
// and op the output_padding.
// Columns: name, x, w, bias, stride, padding, dilation, groups, output_padding, output_size.
const Geometry kConv[] = {
    {"k1", {2, 3, 2, 3, 1}, {2, 3, 1, 1, 1}},
    {"k1_groups", {1, 4, 3, 10, 9}, {4, 2, 1, 1, 1}, true, kOne, kZero, kOne, 2},
    {"k3_p1", {1, 2, 3, 4, 2}, {2, 2, 3, 3, 3}, true, kOne, {1, 1, 1}},
    {"k232", {2, 2, 3, 4, 5}, {1, 2, 2, 3, 2}},
    {"no_bias", {1, 2, 3, 3, 2}, {3, 2, 2, 1, 2}, false},
    {"s2_p1", {1, 2, 4, 5, 3}, {2, 2, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}},
    {"s231", {1, 1, 5, 4, 3}, {2, 1, 2, 3, 1}, true, {2, 3, 1}, {0, 1, 0}},
    {"stride_above_kernel", {1, 2, 5, 4, 7}, {1, 2, 1, 2, 2}, true, {2, 3, 4}},
    {"dilated", {1, 1, 5, 4, 4}, {2, 1, 3, 2, 2}, true, kOne, kZero, {2, 3, 1}},
    {"dilated_strided_padded", {1, 2, 5, 6, 4}, {1, 2, 2, 3, 2}, true, {2, 1, 3}, {1, 2, 0}, {3, 2, 2}},
    {"padding_above_kernel", {1, 1, 2, 1, 3}, {1, 1, 2, 2, 1}, true, {1, 2, 1}, {3, 2, 1}},
    {"groups", {2, 4, 2, 3, 2}, {6, 2, 2, 2, 1}, true, kOne, {0, 1, 0}, kOne, 2},
    {"depthwise", {1, 3, 3, 2, 3}, {3, 1, 2, 2, 2}, true, {1, 1, 2}, {1, 0, 0}, kOne, 3},
    {"depthwise_multiplied", {1, 2, 2, 3, 2}, {4, 1, 1, 2, 2}, true, kOne, kZero, kOne, 2},
    {"depthwise_k3_p1", {2, 3, 5, 4, 7}, {3, 1, 3, 3, 3}, true, kOne, {1, 1, 1}, kOne, 3},
    {"depthwise_k3_s2_p1", {1, 2, 5, 4, 7}, {2, 1, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 2},
    {"depthwise_k5_p2", {1, 2, 3, 5, 4}, {2, 1, 5, 5, 5}, false, kOne, {2, 2, 2}, kOne, 2},
    {"depthwise_k7_s2_p3", {1, 2, 1, 5, 9}, {2, 1, 1, 7, 7}, true, {1, 2, 2}, {0, 3, 3}, kOne, 2},
    {"depthwise_dilated", {1, 2, 5, 3, 7}, {2, 1, 3, 1, 3}, true, {1, 1, 2}, {2, 0, 3}, {2, 1, 3}, 2},
    {"depthwise_multiplied_k3_s2", {1, 2, 4, 5, 3}, {6, 1, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 2},
    {"one_voxel", {1, 2, 1, 1, 1}, {2, 2, 1, 1, 1}},
    {"whole_kernel", {2, 2, 2, 3, 2}, {3, 2, 2, 3, 2}},
    {"many_channels", {1, 9, 2, 2, 2}, {5, 9, 2, 1, 2}, true, kOne, {0, 0, 1}},
    {"unbatched", {2, 3, 2, 3}, {2, 2, 2, 2, 2}},
    {"even_stride_and_dilation", {1, 1, 6, 5, 4}, {1, 1, 2, 2, 2}, true, {2, 2, 2}, {1, 1, 0}, {2, 2, 2}},
};

const Geometry kTransposed[] = {
    {"k1", {2, 3, 2, 3, 1}, {3, 2, 1, 1, 1}},
    {"k1_op", {1, 2, 2, 2, 3}, {2, 2, 1, 1, 1}, true, kOne, kZero, {2, 2, 2}, 1, {1, 0, 1}},
    {"k3_p1", {1, 2, 3, 2, 2}, {2, 2, 3, 3, 3}, true, kOne, {1, 1, 1}},
    {"k232", {1, 2, 2, 1, 3}, {2, 2, 2, 3, 2}},
    {"no_bias", {1, 2, 2, 3, 2}, {2, 3, 2, 1, 2}, false},
    {"k4_s2_p1", {1, 1, 2, 3, 1}, {1, 2, 4, 4, 4}, true, {2, 2, 2}, {1, 1, 1}},
    {"k3_s2_p1_op1", {1, 2, 2, 2, 1}, {2, 1, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 1, {1, 1, 1}},
    {"op_per_axis", {1, 1, 2, 2, 3}, {1, 2, 2, 3, 1}, true, {3, 2, 2}, {0, 1, 0}, kOne, 1, {2, 0, 1}},
    {"op_below_dilation", {1, 1, 2, 1, 2}, {1, 2, 2, 1, 2}, true, kOne, kZero, {3, 2, 2}, 1, {2, 1, 0}},
    {"stride_above_kernel", {1, 2, 2, 1, 2}, {2, 1, 1, 2, 2}, true, {2, 3, 4}},
    {"stride_above_kernel_padded", {1, 1, 2, 2, 2}, {1, 2, 1, 2, 1}, true, {3, 4, 2}, {1, 1, 0}, kOne, 1, {1, 0, 1}},
    {"dilated", {1, 1, 2, 3, 2}, {1, 2, 3, 2, 2}, true, kOne, kZero, {2, 3, 1}},
    {"dilated_strided_padded", {1, 2, 2, 2, 3}, {2, 1, 2, 3, 2}, true, {2, 1, 3}, {1, 2, 0}, {3, 2, 2}},
    {"gcd_of_stride_and_dilation",
     {1, 1, 2, 3, 2},
     {1, 1, 3, 2, 2},
     true,
     {2, 4, 6},
     {1, 0, 2},
     {2, 6, 4},
     1,
     {1, 2, 3}},
    {"padding_above_kernel", {1, 1, 4, 3, 3}, {1, 2, 2, 1, 2}, true, {2, 2, 1}, {3, 1, 1}},
    {"groups", {2, 4, 2, 2, 2}, {4, 3, 2, 2, 1}, true, {1, 2, 1}, {0, 1, 0}, kOne, 2},
    {"depthwise", {1, 3, 2, 2, 1}, {3, 1, 2, 2, 3}, true, {2, 1, 2}, {1, 0, 0}, kOne, 3, {1, 0, 0}},
    {"depthwise_multiplied", {1, 2, 2, 1, 2}, {2, 2, 1, 2, 2}, true, kOne, kZero, kOne, 2},
    {"depthwise_k3_s2_p1_op1", {1, 2, 2, 3, 2}, {2, 1, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 2, {1, 1, 1}},
    {"depthwise_k5_p2", {1, 2, 3, 2, 5}, {2, 1, 5, 5, 5}, false, kOne, {2, 2, 2}, kOne, 2},
    {"depthwise_k7_dilated", {1, 2, 1, 3, 3}, {2, 1, 1, 3, 7}, true, {1, 1, 2}, {0, 2, 3}, {1, 2, 1}, 2},
    {"depthwise_multiplied_k3_s2", {1, 2, 2, 1, 3}, {2, 3, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 2},
    {"one_voxel", {1, 2, 1, 1, 1}, {2, 2, 1, 1, 1}},
    {"one_voxel_up", {1, 2, 1, 1, 1}, {2, 1, 4, 2, 3}, true, {2, 2, 2}, {1, 0, 0}},
    {"many_channels", {1, 9, 1, 2, 1}, {9, 5, 2, 1, 2}, true, {2, 1, 1}},
    {"output_size", {1, 1, 2, 3, 2}, {1, 2, 3, 3, 3}, true, {2, 2, 2}, {1, 1, 1}, kOne, 1, kZero, Triple{4, 5, 4}},
    {"unbatched", {2, 2, 1, 2}, {2, 2, 2, 2, 2}, true, {2, 1, 2}},
};

ConvOptions<3> conv_options(const Geometry& g) { return {g.stride, g.padding, g.dilation, g.groups}; }
ConvTransposeOptions<3> transpose_options(const Geometry& g) {
  return {g.stride, g.padding, g.output_padding, g.groups, g.dilation, g.output_size};
}

/// Computes the reference result of a geometry. `a` holds x, w and the bias. The batch axis of x is optional.
Array reference_of(bool transposed, const Geometry& g, const Arrays& a) {
  const Array* bias = g.bias ? &a[2] : nullptr;
  const auto run = [&](const Array& x) {
    return transposed ? reference::conv_transpose(x, a[1], bias, transpose_options(g))
                      : reference::conv(x, a[1], bias, conv_options(g));
  };
  if (a[0].shape.size() == a[1].shape.size()) return run(a[0]);
  Shape batched = a[0].shape;
  batched.insert(0, 1);
  Array y = run(reference::reshaped(a[0], batched));
  y.shape.erase(0);
  return y;
}

std::vector<Input> inputs_of(bool transposed, const Geometry& g, Domain domain) {
  std::vector<Input> inputs{{g.x, domain}, {g.w, domain}};
  if (g.bias) inputs.push_back({{transposed ? g.w[1] * g.groups : g.w[0]}, domain});
  return inputs;
}

/// Adds a case with real inputs and a case with integer inputs. The options of `g` have three spatial axes; the tensors
/// of `g` may have fewer.
void add(std::vector<OpCase>& cases, const std::string& name, bool transposed, const Geometry& g,
         const Function& function) {
  OpCase c{name, function, inputs_of(transposed, g, Domain::any)};
  c.reference = [=](const Arrays& a) { return reference_of(transposed, g, a); };
  Shape no_batch = g.x;
  if (g.x.size() == g.w.size()) {
    no_batch[0] = 0;
    c.edges.push_back({no_batch, g.w});
    if (g.bias) c.edges.back().push_back(c.inputs[2].shape);
  }
  c.keeps_layout = g.x.size() == 5;
  cases.push_back(c);
  // Sums of integers are exact, so any wrong index is detected.
  c.name += "_exact";
  c.inputs = inputs_of(transposed, g, Domain::integers);
  c.exact = true;
  c.differentiable = false;
  cases.push_back(c);
}

Tensor bias_of(const Tensors& t) { return t.size() > 2 ? t[2] : Tensor(); }

void add_fewer_axes(std::vector<OpCase>& cases) {
  const Geometry conv2{"", {2, 2, 4, 3}, {3, 2, 3, 2}, true, {1, 2, 1}, {0, 1, 0}, {1, 1, 2}};
  add(cases, "conv2d", false, conv2, [](const Tensors& t) {
    return conv2d(t[0], t[1], t[2], {.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}});
  });
  const Geometry conv1{"", {2, 4, 5}, {2, 2, 3}, false, {1, 1, 2}, {0, 0, 1}, kOne, 2};
  add(cases, "conv1d", false, conv1,
      [](const Tensors& t) { return conv1d(t[0], t[1], {}, {.stride = 2, .padding = 1, .groups = 2}); });
  const Geometry up2{"", {1, 2, 3, 2}, {2, 2, 3, 2}, true, {1, 2, 1}, {0, 1, 0}, {1, 1, 2}, 1, {0, 1, 0}};
  add(cases, "conv_transpose2d", true, up2, [](const Tensors& t) {
    return conv_transpose2d(t[0], t[1], t[2],
                            {.stride = {2, 1}, .padding = {1, 0}, .output_padding = {1, 0}, .dilation = {1, 2}});
  });
  const Geometry up1{"", {2, 2, 3}, {2, 1, 4}, true, {1, 1, 3}, {0, 0, 1}, kOne, 2, {0, 0, 2}};
  add(cases, "conv_transpose1d", true, up1, [](const Tensors& t) {
    return conv_transpose1d(t[0], t[1], t[2], {.stride = 3, .padding = 1, .groups = 2, .output_size = 10});
  });
  const Geometry depthwise2{"", {1, 3, 5, 4}, {3, 1, 3, 3}, true, {1, 2, 1}, {0, 1, 1}, kOne, 3};
  add(cases, "conv2d_depthwise", false, depthwise2, [](const Tensors& t) {
    return conv2d(t[0], t[1], t[2], {.stride = {2, 1}, .padding = 1, .groups = 3});
  });
  const Geometry depthwise1{"", {2, 2, 9}, {4, 1, 5}, true, {1, 1, 2}, {0, 0, 2}, kOne, 2};
  add(cases, "conv1d_depthwise", false, depthwise1,
      [](const Tensors& t) { return conv1d(t[0], t[1], t[2], {.stride = 2, .padding = 2, .groups = 2}); });
  const Geometry depthwise_up2{"", {1, 3, 2, 3}, {3, 1, 3, 3}, true, {1, 2, 1}, {0, 1, 1}, kOne, 3};
  add(cases, "conv_transpose2d_depthwise", true, depthwise_up2, [](const Tensors& t) {
    return conv_transpose2d(t[0], t[1], t[2], {.stride = {2, 1}, .padding = 1, .groups = 3});
  });
  const Geometry depthwise_up1{"", {2, 2, 4}, {2, 2, 5}, true, {1, 1, 2}, {0, 0, 2}, kOne, 2};
  add(cases, "conv_transpose1d_depthwise", true, depthwise_up1,
      [](const Tensors& t) { return conv_transpose1d(t[0], t[1], t[2], {.stride = 2, .padding = 2, .groups = 2}); });
}

/// Adds a convolution with fused ReLU and, if x has a batch axis, a convolution with fused ReLU and GroupNorm. The
/// references compute the operators separately.
void add_chains(std::vector<OpCase>& cases, bool transposed, const Geometry& g) {
  const std::string name = std::string(transposed ? "conv_transpose3d_" : "conv3d_") + g.name;
  const auto relu_of = [=](const Arrays& a) {
    return reference::map(reference_of(transposed, g, a), [](double v) { return v > 0 ? v : 0.0; });
  };
  const auto run = [=](const Tensors& t, const NormArguments& norm) {
    const Tensor bias = g.bias ? t[2] : Tensor();
    const auto with = [&](const auto& options) {
      return conv_norm_activation(t[0], t[1], bias, options, {norm, {ActivationKind::relu}, true});
    };
    return transposed ? with(transpose_options(g)) : with(conv_options(g));
  };
  OpCase c{name + "_relu", [=](const Tensors& t) { return run(t, {}); }, inputs_of(transposed, g, Domain::any)};
  c.reference = relu_of;
  c.keeps_layout = g.x.size() == 5;
  c.tolerance = 3e-5;
  Shape no_batch = g.x;
  no_batch[0] = 0;
  std::vector<Shape> edge{no_batch, g.w};
  if (g.bias) edge.push_back(c.inputs[2].shape);
  c.edges = {edge};
  if (g.x.size() < 5) c.edges.clear();
  cases.push_back(c);
  if (g.x.size() < 5) return;

  const Shape channels{transposed ? g.w[1] * g.groups : g.w[0]};
  const int64_t groups = channels[0] % 2 == 0 ? channels[0] / 2 : 1;
  const size_t gamma = c.inputs.size(), beta = gamma + 1;
  c.name += "_group_norm";
  c.roundings = 4;  // the norm amplifies the rounding of the convolution
  c.function = [=](const Tensors& t) { return run(t, {NormKind::group, t[gamma], t[beta], 0.1, groups}); };
  c.reference = [=](const Arrays& a) { return reference::group_norm(relu_of(a), groups, &a[gamma], &a[beta], 0.1); };
  for (int i = 0; i < 2; ++i) {
    c.inputs.push_back({channels});
    c.edges[0].push_back(channels);
  }
  cases.push_back(c);
}

void add_chains(std::vector<OpCase>& cases) {
  for (const Geometry& g : kConv)
    if (const std::string name = g.name; name == "s2_p1" || name == "groups" || name == "unbatched")
      add_chains(cases, false, g);
  for (const Geometry& g : kTransposed)
    if (const std::string name = g.name;
        name == "k3_p1" || name == "groups" || name == "dilated_strided_padded" || name == "unbatched")
      add_chains(cases, true, g);
  const Geometry plain{"plain", {2, 3, 2, 3, 2}, {3, 2, 2, 1, 2}, false};
  const Geometry gaps{
      "gaps", {2, 2, 2, 1, 3}, {2, 2, 1, 2, 1}, true, {2, 3, 2}};  // outputs that no input reaches equal the bias
  for (const Geometry& g : {plain, gaps}) add_chains(cases, true, g);

  const Geometry up1{"", {2, 2, 3}, {2, 2, 4}, true, {1, 1, 3}, {0, 0, 1}};
  OpCase one_axis{"conv_transpose1d_relu_group_norm",
                  [](const Tensors& t) {
                    return conv_norm_activation(t[0], t[1], t[2], ConvTransposeOptions<1>{.stride = 3, .padding = 1},
                                                {{.kind = NormKind::group, .eps = 0.1}, {ActivationKind::relu}, true});
                  },
                  inputs_of(true, up1, Domain::any)};
  one_axis.reference = [up1](const Arrays& a) {
    const Array y = reference::map(reference_of(true, up1, a), [](double v) { return v > 0 ? v : 0.0; });
    return reference::group_norm(y, 1, nullptr, nullptr, 0.1);
  };
  one_axis.tolerance = 3e-5;
  one_axis.roundings = 4;
  cases.push_back(one_axis);
}

/// Adds a convolution to whose channels the channels of another tensor are appended. With a norm, the function computes
/// the operators separately.
void add_appended(std::vector<OpCase>& cases, bool transposed, const Geometry& g, bool norm) {
  OpCase c{concat(transposed ? "conv_transpose3d_" : "conv3d_", g.name, norm ? "_norm" : "", "_cat"),
           {},
           inputs_of(transposed, g, Domain::any)};
  const size_t last = c.inputs.size();
  const int64_t channels = transposed ? g.w[1] * g.groups : g.w[0];
  c.function = [=](const Tensors& t) {
    const auto with = [&](const auto& options) {
      const NormArguments of_norm{.kind = norm ? NormKind::instance : NormKind::none, .eps = 0.1};
      return conv_norm_activation(t[0], t[1], g.bias ? t[2] : Tensor(), options,
                                  {.norm = of_norm, .appended = t[last]});
    };
    return transposed ? with(transpose_options(g)) : with(conv_options(g));
  };
  c.reference = [=](const Arrays& a) {
    Array y = reference_of(transposed, g, a);
    if (norm) y = reference::group_norm(y, channels, nullptr, nullptr, 0.1);
    const int64_t axis = y.shape.size() - 4;
    Shape shape = y.shape;
    shape[axis] += a[last].shape[axis];
    return reference::build(shape, [&](Dims i) {
      if (i[axis] < channels) return y(i);
      i[axis] -= channels;
      return a[last](i);
    });
  };
  Arrays zeros;
  for (const Input& input : c.inputs) zeros.push_back(reference::build(input.shape, [](const Dims&) { return 0.0; }));
  Shape appended = reference_of(transposed, g, zeros).shape;
  appended[appended.size() - 4] = 2;
  c.inputs.push_back({appended});
  c.keeps_layout = g.x.size() == 5;
  c.tolerance = 3e-5;
  c.roundings = norm ? 4 : 1;
  cases.push_back(c);
}

void add_bottleneck(std::vector<OpCase>& cases) {
  OpCase c{"inverted_bottleneck",
           [](const Tensors& t) { return inverted_bottleneck(t[0], t[1], t[2], t[3], t[4]); },
           {{{2, 3, 2, 1, 3}}, {{8, 3, 1, 1, 1}}, {{8}}, {{2, 8, 1, 1, 1}}, {{2}}}};
  c.reference = [](const Arrays& a) {
    const Array hidden = reference_of(false, {"", a[0].shape, a[1].shape, true}, {a[0], a[1], a[2]});
    const Array y = reference::map(hidden, [](double v) { return v * 0.5 * (1 + std::erf(v * std::sqrt(0.5))); });
    return reference_of(false, {"", y.shape, a[3].shape, true}, {y, a[3], a[4]});
  };
  c.edges = {{{0, 3, 2, 1, 3}, {8, 3, 1, 1, 1}, {8}, {2, 8, 1, 1, 1}, {2}}};
  c.keeps_layout = true;
  c.roundings = 3;  // the hidden tensor and the result of GELU are rounded, too
  cases.push_back(c);
  c.name = "inverted_bottleneck_no_bias";
  c.function = [](const Tensors& t) { return inverted_bottleneck(t[0], t[1], {}, t[2], {}); };
  c.inputs = {{{3, 2, 1, 3}}, {{5, 3, 1, 1, 1}}, {{2, 5, 1, 1, 1}}};  // x has no batch axis
  c.reference = [](const Arrays& a) {
    const Array hidden = reference_of(false, {"", a[0].shape, a[1].shape, false}, {a[0], a[1]});
    const Array y = reference::map(hidden, [](double v) { return v * 0.5 * (1 + std::erf(v * std::sqrt(0.5))); });
    return reference_of(false, {"", y.shape, a[2].shape, false}, {y, a[2]});
  };
  c.edges = {};
  c.keeps_layout = false;
  cases.push_back(c);
}

}  // namespace

void add_conv_cases(std::vector<OpCase>& cases) {
  for (const Geometry& g : kConv)
    add(cases, std::string("conv3d_") + g.name, false, g,
        [g](const Tensors& t) { return conv3d(t[0], t[1], bias_of(t), conv_options(g)); });
  for (const Geometry& g : kTransposed)
    add(cases, std::string("conv_transpose3d_") + g.name, true, g,
        [g](const Tensors& t) { return conv_transpose3d(t[0], t[1], bias_of(t), transpose_options(g)); });
  add_fewer_axes(cases);
  add_chains(cases);
  for (const Geometry& g : kTransposed)
    if (const std::string name = g.name; name == "k3_p1" || name == "groups" || name == "unbatched") {
      add_appended(cases, true, g, false);
      if (name == "k3_p1") add_appended(cases, true, g, true);
    }
  add_appended(cases, false, kConv[0], false);
  add_bottleneck(cases);
}

}  // namespace voxgrad::optest
