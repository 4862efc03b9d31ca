// Cases of pooling and interpolation with one or two spatial axes, adaptive pooling, padding, grid sampling and pixel
// shuffle. Cases whose name contains "signal" have one spatial axis; cases whose name contains "image" have two.
#include <algorithm>
#include <cmath>

#include "ops/grid_sample.h"
#include "ops/pad.h"
#include "ops/pixel_shuffle.h"
#include "ops/pool.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

/// Adapts a reference for (N, C, D, H, W) to fewer spatial axes. Missing axes get size 1 and come first.
Reference lift_to_volume(const Reference& volume) {
  return [volume](const Arrays& a) {
    Shape shape = a[0].shape;
    while (shape.size() < 5) shape.insert(2, 1);
    const Array y = volume({reference::reshaped(a[0], shape)});
    Shape result = y.shape;
    while (result.size() > a[0].shape.size()) result.erase(2);
    return reference::reshaped(y, result);
  };
}

/// Adds a case. Cases with one input and no edge shapes get an empty batch as an edge shape.
void add(std::vector<OpCase>& cases, OpCase c, bool keeps_layout = true) {
  c.keeps_layout = keeps_layout && c.inputs[0].shape.size() >= 4;
  if (c.edges.empty() && c.inputs.size() == 1) {
    Shape empty = c.inputs[0].shape;
    empty[0] = 0;
    c.edges = {{empty}};
  }
  cases.push_back(std::move(c));
}

void add_pools_1d_2d(std::vector<OpCase>& cases) {
  const auto max_reference = [](const MaxPoolOptions<3>& o, bool indices = false) {
    return lift_to_volume([=](const Arrays& a) { return reference::max_pool(a[0], o, indices); });
  };
  const auto avg_reference = [](const AvgPoolOptions<3>& o) {
    return lift_to_volume([o](const Arrays& a) { return reference::avg_pool(a[0], o); });
  };
  add(cases, {"max_pool2d",
              [](const Tensors& t) {
                return max_pool2d(t[0], {.kernel_size = {2, 3}, .stride = Extent<2>{1, 2}, .padding = {1, 1}});
              },
              {{{2, 3, 5, 6}, Domain::distinct}},
              max_reference({.kernel_size = {1, 2, 3}, .stride = Triple{1, 1, 2}, .padding = {0, 1, 1}})});
  add(cases, {"max_pool1d",
              [](const Tensors& t) { return max_pool1d(t[0], {.kernel_size = 3, .stride = 2, .padding = 1}); },
              {{{2, 3, 9}, Domain::distinct}},
              max_reference({.kernel_size = {1, 1, 3}, .stride = Triple{1, 1, 2}, .padding = {0, 0, 1}})});
  OpCase indices{
      "max_pool2d_with_indices",
      [](const Tensors& t) {
        return max_pool2d_with_indices(t[0], {.kernel_size = {3, 2}, .stride = 1, .padding = {1, 0}}).indices;
      },
      {{{2, 3, 5, 6}, Domain::ties}},
      max_reference({.kernel_size = {1, 3, 2}, .stride = Triple{1, 1, 1}, .padding = {0, 1, 0}}, true)};
  indices.differentiable = false;
  add(cases, indices);
  indices.name = "max_pool1d_with_indices";
  indices.function = [](const Tensors& t) {
    return max_pool1d_with_indices(t[0], {.kernel_size = 3, .stride = 2, .dilation = 2}).indices;
  };
  indices.inputs[0].shape = {2, 3, 9};
  indices.reference = max_reference({.kernel_size = {1, 1, 3}, .stride = Triple{1, 1, 2}, .dilation = {1, 1, 2}}, true);
  add(cases, indices);
  add(cases, {"avg_pool2d",
              [](const Tensors& t) {
                return avg_pool2d(t[0], {.kernel_size = 3, .stride = 2, .padding = 1, .divisor_override = 4});
              },
              {{{2, 3, 5, 6}}},
              avg_reference(
                  {.kernel_size = {1, 3, 3}, .stride = Triple{1, 2, 2}, .padding = {0, 1, 1}, .divisor_override = 4})});
  add(cases, {"avg_pool1d",
              [](const Tensors& t) { return avg_pool1d(t[0], {.kernel_size = 2, .ceil_mode = true}); },
              {{{2, 3, 7}}},
              avg_reference({.kernel_size = {1, 1, 2}, .ceil_mode = true})});
}

/// Computes the mean or maximum over each window of an adaptive pooling. x has the shape (N, C, D, H, W).
Array adaptive_pool(const Array& x, const Triple& size, bool maximum) {
  return reference::build({x.size(0), x.size(1), size[0], size[1], size[2]}, [&](const Dims& o) {
    int64_t begin[3], end[3], count = 0;
    for (int i = 0; i < 3; ++i) {
      begin[i] = o[i + 2] * x.size(i + 2) / size[i];
      end[i] = ((o[i + 2] + 1) * x.size(i + 2) + size[i] - 1) / size[i];
    }
    double total = 0, largest = -INFINITY;
    for (int64_t d = begin[0]; d < end[0]; ++d)
      for (int64_t h = begin[1]; h < end[1]; ++h)
        for (int64_t w = begin[2]; w < end[2]; ++w, ++count) {
          total += x({o[0], o[1], d, h, w});
          largest = std::max(largest, x({o[0], o[1], d, h, w}));
        }
    return maximum ? largest : total / static_cast<double>(count);
  });
}

void add_adaptive_pools(std::vector<OpCase>& cases) {
  for (const Triple& size : {Triple(1), Triple(2, 3, 4), Triple(4, 5, 3), Triple(3, 7, 2)}) {
    const std::string suffix = concat('_', size[0], '_', size[1], '_', size[2]);
    add(cases, {"adaptive_avg_pool3d" + suffix,
                [=](const Tensors& t) { return adaptive_avg_pool3d(t[0], size); },
                {{{1, 2, 4, 5, 6}}},
                [=](const Arrays& a) { return adaptive_pool(a[0], size, false); }});
    add(cases,
        {"adaptive_max_pool3d" + suffix,
         [=](const Tensors& t) { return adaptive_max_pool3d(t[0], size); },
         {{{1, 2, 4, 5, 6}, Domain::distinct}},
         [=](const Arrays& a) { return adaptive_pool(a[0], size, true); }},
        false);
  }
  const auto add_flat = [&](const char* name, const Function& function, const Shape& shape, const Triple& size) {
    const bool maximum = std::string(name).starts_with("adaptive_max");
    add(cases, {name, function, {{shape, Domain::distinct}}, lift_to_volume([=](const Arrays& a) {
                  return adaptive_pool(a[0], size, maximum);
                })});
  };
  const Shape image{2, 3, 5, 4};
  add_flat("adaptive_avg_pool2d", [](const Tensors& t) { return adaptive_avg_pool2d(t[0], {3, 2}); }, image, {1, 3, 2});
  add_flat("adaptive_max_pool2d", [](const Tensors& t) { return adaptive_max_pool2d(t[0], {3, 2}); }, image, {1, 3, 2});
  const Shape signal{2, 3, 7};
  add_flat("adaptive_avg_pool1d", [](const Tensors& t) { return adaptive_avg_pool1d(t[0], 3); }, signal, {1, 1, 3});
  add_flat("adaptive_max_pool1d", [](const Tensors& t) { return adaptive_max_pool1d(t[0], 3); }, signal, {1, 1, 3});
}

void add_interpolations_1d_2d(std::vector<OpCase>& cases) {
  using enum InterpolateMode;
  const Shape signal{2, 3, 5}, image{2, 3, 4, 5};
  const struct {
    const char* name;
    Shape shape;
    InterpolateOptions options;
    InterpolateOptions volume;  // the same options for a volume; unused for bicubic
  } table[] = {
      {"linear", signal, {.size = 8, .mode = linear}, {.size = Triple(1, 1, 8), .mode = trilinear}},
      {"linear_scale",
       signal,
       {.scale_factor = 1.7, .mode = linear},
       {.scale_factor = ScaleFactor(1, 1, 1.7), .mode = trilinear}},
      {"nearest_signal", signal, {.scale_factor = 2}, {.scale_factor = ScaleFactor(1, 1, 2)}},
      {"bilinear",
       image,
       {.size = Dims{7, 3}, .mode = bilinear, .align_corners = true},
       {.size = Triple(1, 7, 3), .mode = trilinear, .align_corners = true}},
      {"bilinear_scales",
       image,
       {.scale_factor = ScaleFactor(2, 1.3), .mode = bilinear},
       {.scale_factor = ScaleFactor(1, 2, 1.3), .mode = trilinear}},
      {"nearest_exact_image",
       image,
       {.size = 3, .mode = nearest_exact},
       {.size = Triple(1, 3, 3), .mode = nearest_exact}},
      {"bicubic", image, {.size = Dims{7, 3}, .mode = bicubic}, {}},
      {"bicubic_x2", image, {.scale_factor = 2, .mode = bicubic}, {}},
      {"bicubic_aligned", image, {.size = Extent<2>{6, 9}, .mode = bicubic, .align_corners = true}, {}},
  };
  for (const auto& row : table)
    add(cases, {std::string("interpolate_") + row.name,
                [o = row.options](const Tensors& t) { return interpolate(t[0], o); },
                {{row.shape}},
                row.options.mode == bicubic ? Reference() : lift_to_volume([o = row.volume](const Arrays& a) {
                  return reference::interpolate(a[0], o);
                })});
}

void add_pads(std::vector<OpCase>& cases) {
  const struct {
    const char* name;
    PadMode mode;
    Shape shape;
    std::vector<int64_t> amounts;
  } table[] = {
      {"reflect", PadMode::reflect, {1, 2, 3, 4, 3}, {1, 2, 3, 0, 2, 1}},
      {"reflect_image", PadMode::reflect, {2, 2, 3, 4}, {3, -1, 0, 2}},
      {"replicate", PadMode::replicate, {1, 2, 1, 3, 4}, {2, 5, 0, 1, 3, 1}},
      {"replicate_signal", PadMode::replicate, {2, 3, 4}, {-1, 2}},
      {"circular", PadMode::circular, {1, 2, 2, 3, 4}, {4, 1, 0, 3, 2, 2}},
  };
  for (const auto& row : table) {
    const auto padded = [mode = row.mode, amounts = row.amounts](const Arrays& a) {
      const Array& x = a[0];
      const auto axes = static_cast<int64_t>(amounts.size() / 2), first = x.shape.size() - axes;
      Shape shape = x.shape;
      for (size_t i = 0; i < amounts.size(); ++i) shape[x.shape.size() - 1 - static_cast<int64_t>(i / 2)] += amounts[i];
      return reference::build(shape, [&](const Dims& o) {
        Dims from = o;
        for (int64_t axis = first; axis < o.size(); ++axis) {
          const int64_t n = x.size(axis), last = n - 1;
          int64_t i = o[axis] - amounts[static_cast<size_t>(2 * (o.size() - 1 - axis))];
          if (mode == PadMode::circular) i = (i + n) % n;
          if (mode == PadMode::replicate) i = std::min(std::max<int64_t>(i, 0), last);
          if (mode == PadMode::reflect) i = last - std::abs(last - std::abs(i));
          from[axis] = i;
        }
        return x(from);
      });
    };
    add(cases, {std::string("pad_") + row.name,
                [mode = row.mode, amounts = row.amounts](const Tensors& t) { return pad(t[0], amounts, mode); },
                {{row.shape}},
                padded});
  }
}

/// Samples x (N, C, D, H, W) at the positions of grid (N, D', H', W', 3), as a weighted sum over all voxels.
Array grid_sample_reference(const Array& x, const Array& grid, const GridSampleOptions& o) {
  return reference::build({x.size(0), x.size(1), grid.size(1), grid.size(2), grid.size(3)}, [&](const Dims& index) {
    double at[3];
    for (int64_t i = 0; i < 3; ++i) {
      const auto n = static_cast<double>(x.size(i + 2));
      const double g = grid({index[0], index[2], index[3], index[4], 2 - i});
      double p = o.align_corners ? (g + 1) / 2 * (n - 1) : ((g + 1) * n - 1) / 2;
      const double low = o.align_corners ? 0 : -0.5, span = o.align_corners ? n - 1 : n;
      if (o.padding_mode == GridSampleOptions::Padding::reflection)
        p = span > 0 ? low + span - std::fabs(std::fmod(std::fabs(p - low), 2 * span) - span) : 0;
      if (o.padding_mode != GridSampleOptions::Padding::zeros) p = std::clamp(p, 0.0, n - 1);
      at[i] = o.nearest ? std::nearbyint(p) : p;
    }
    double total = 0;
    for (int64_t d = 0; d < x.size(2); ++d)
      for (int64_t h = 0; h < x.size(3); ++h)
        for (int64_t w = 0; w < x.size(4); ++w) {
          double weight = 1;
          const int64_t voxel[3] = {d, h, w};
          for (int i = 0; i < 3; ++i) weight *= std::max(0.0, 1 - std::fabs(at[i] - static_cast<double>(voxel[i])));
          total += weight * x({index[0], index[1], d, h, w});
        }
    return total;
  });
}

void add_grids(std::vector<OpCase>& cases) {
  using enum GridSampleOptions::Padding;
  const std::pair<const char*, GridSampleOptions> table[] = {
      {"zeros", {}},
      {"zeros_aligned", {.align_corners = true}},
      {"border", {.padding_mode = border}},
      {"border_aligned", {.padding_mode = border, .align_corners = true}},
      {"reflection", {.padding_mode = reflection}},
      {"reflection_aligned", {.padding_mode = reflection, .align_corners = true}},
      {"nearest", {.nearest = true}},
      {"nearest_reflection", {.nearest = true, .padding_mode = reflection, .align_corners = true}},
  };
  for (const auto& [name, options] : table) {
    add(cases,
        {std::string("grid_sample_") + name,
         [o = options](const Tensors& t) { return grid_sample(t[0], t[1], o); },
         {{{2, 2, 3, 4, 5}}, {{2, 2, 3, 2, 3}}},
         [o = options](const Arrays& a) { return grid_sample_reference(a[0], a[1], o); },
         {{{0, 2, 3, 4, 5}, {0, 2, 3, 2, 3}}, {{1, 1, 1, 1, 1}, {1, 1, 1, 2, 3}}, {{1, 2, 3, 1, 2}, {1, 1, 0, 2, 3}}}});
    cases.back().once_differentiable = true;
    cases.back().tolerance = 3e-5;
  }
  add(cases, {"grid_sample_image",
              [](const Tensors& t) { return grid_sample(t[0], t[1]); },
              {{{2, 3, 4, 5}}, {{2, 3, 4, 2}}},
              [](const Arrays& a) {
                const Array volume = reference::reshaped(a[0], {2, 3, 1, 4, 5});
                const Array grid = reference::build({2, 1, 3, 4, 3}, [&](const Dims& i) {
                  return i[4] < 2 ? a[1]({i[0], i[2], i[3], i[4]}) : 0.0;
                });
                return reference::reshaped(grid_sample_reference(volume, grid, {}), {2, 3, 3, 4});
              }});
  cases.back().once_differentiable = true;
  for (const bool aligned : {false, true}) {
    add(cases,
        {aligned ? "affine_grid_aligned" : "affine_grid",
         [=](const Tensors& t) {
           return affine_grid(t[0], {2, 3, 3, 1, 4}, aligned);
         },
         {{{2, 3, 4}}},
         [=](const Arrays& a) {
           return reference::build({2, 3, 1, 4, 3}, [&](const Dims& o) {
             double sum = a[0]({o[0], o[4], 3});
             const double n[3] = {4, 1, 3};
             for (int64_t i = 0; i < 3; ++i) {
               const auto at = static_cast<double>(o[3 - i]);
               const double center = aligned ? (n[i] > 1 ? 2 * at / (n[i] - 1) - 1 : 0) : (2 * at + 1) / n[i] - 1;
               sum += center * a[0]({o[0], o[4], i});
             }
             return sum;
           });
         }},
        false);
    cases.back().edges.clear();
    cases.back().roundings = 2;
  }
}

void add_pixel_shuffles(std::vector<OpCase>& cases) {
  add(cases, {"pixel_shuffle",
              [](const Tensors& t) { return pixel_shuffle(t[0], 2); },
              {{{1, 16, 2, 1, 3}}},
              [](const Arrays& a) {
                return reference::build({a[0].size(0), 2, 4, 2, 6}, [&](const Dims& o) {
                  const int64_t part = o[2] % 2 * 4 + o[3] % 2 * 2 + o[4] % 2;
                  return a[0]({o[0], o[1] * 8 + part, o[2] / 2, o[3] / 2, o[4] / 2});
                });
              }});
  add(cases, {"pixel_shuffle_image",
              [](const Tensors& t) { return pixel_shuffle(t[0], 3); },
              {{{2, 9, 2, 1}}},
              [](const Arrays& a) {
                return reference::build({a[0].size(0), 1, 6, 3}, [&](const Dims& o) {
                  return a[0]({o[0], o[2] % 3 * 3 + o[3] % 3, o[2] / 3, o[3] / 3});
                });
              }});
}

}  // namespace

void add_sampling_cases(std::vector<OpCase>& cases) {
  add_pools_1d_2d(cases);
  add_adaptive_pools(cases);
  add_interpolations_1d_2d(cases);
  add_pads(cases);
  add_grids(cases);
  add_pixel_shuffles(cases);
}

}  // namespace voxgrad::optest
