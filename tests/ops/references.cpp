// Implements the reference operators.
#include "tests/ops/references.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace voxgrad::reference {

size_t Array::position(const Dims& index) const {
  int64_t at = 0;
  for (int64_t i = 0; i < shape.size(); ++i) at = at * shape[i] + index[i];
  return static_cast<size_t>(at);
}

Array array_of(const Tensor& tensor) { return {tensor.shape(), tensor.to_vector<double>()}; }

Array build(const Shape& shape, const std::function<double(const Dims& index)>& element) {
  Array out{shape, {}};
  Dims index = Dims::filled(shape.size(), 0);
  for (int64_t count = numel(shape); count > 0; --count) {
    out.values.push_back(element(index));
    for (int64_t axis = shape.size() - 1; axis >= 0 && ++index[axis] == shape[axis]; --axis) index[axis] = 0;
  }
  return out;
}

Array reshaped(const Array& x, const Shape& shape) { return {shape, x.values}; }

double broadcast(const Array& x, const Dims& index) {
  Dims own = x.shape;
  const int64_t lead = index.size() - x.shape.size();
  for (int64_t i = 0; i < own.size(); ++i) own[i] = x.shape[i] == 1 ? 0 : index[lead + i];
  return x(own);
}

Array map(const Array& x, double (*f)(double)) {
  return build(x.shape, [&](const Dims& i) { return f(x(i)); });
}

Array map(const Array& x, const Array& y, const std::function<double(double, double)>& f) {
  return build(broadcast_shapes(x.shape, y.shape, "reference"),
               [&](const Dims& i) { return f(broadcast(x, i), broadcast(y, i)); });
}

Array reduce(const Array& x, const Dims& axes, bool keepdim,
             const std::function<double(const std::vector<double>&)>& f) {
  Shape kept = axes.empty() ? Dims::filled(x.shape.size(), 1) : x.shape;
  for (int64_t axis : axes) kept[axis < 0 ? axis + x.shape.size() : axis] = 1;
  Array groups = build(kept, [](const Dims&) { return 0; });
  std::vector<std::vector<double>> lists(groups.values.size());
  build(x.shape, [&](const Dims& i) {
    Dims group = i;
    for (int64_t axis = 0; axis < i.size(); ++axis)
      if (kept[axis] == 1) group[axis] = 0;
    lists[groups.position(group)].push_back(x(i));
    return 0;
  });
  for (size_t g = 0; g < lists.size(); ++g) groups.values[g] = f(lists[g]);
  if (keepdim) return groups;
  Shape shape;
  for (int64_t axis = 0; axis < kept.size(); ++axis) {
    bool reduced = axes.empty();
    for (int64_t a : axes) reduced |= (a < 0 ? a + kept.size() : a) == axis;
    if (!reduced) shape.push_back(kept[axis]);
  }
  return reshaped(groups, shape);
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (double value : values) total += value;
  return total;
}
double mean(const std::vector<double>& values) { return sum(values) / static_cast<double>(values.size()); }

Array matmul(const Array& left, const Array& right) {
  const bool row = left.shape.size() == 1, column = right.shape.size() == 1;
  const Array a = row ? reshaped(left, {1, left.size(0)}) : left;
  const Array b = column ? reshaped(right, {right.size(0), 1}) : right;
  const auto batch_of = [](const Array& x) {
    Shape batch;
    for (int64_t i = 0; i + 2 < x.shape.size(); ++i) batch.push_back(x.shape[i]);
    return batch;
  };
  Shape shape = broadcast_shapes(batch_of(a), batch_of(b), "reference");
  const int64_t batch_axes = shape.size(), inner = a.shape.back();
  shape.push_back(a.size(a.shape.size() - 2));
  shape.push_back(b.shape.back());
  Array c = build(shape, [&](const Dims& i) {
    double total = 0;
    for (int64_t k = 0; k < inner; ++k) {
      Dims ai = i, bi = i;
      ai[batch_axes + 1] = k;
      bi[batch_axes] = k;
      total += broadcast(a, ai) * broadcast(b, bi);
    }
    return total;
  });
  if (row) shape.erase(batch_axes);
  if (column) shape.erase(shape.size() - 1);
  return reshaped(c, shape);
}

Array softmax(const Array& x, int64_t axis, bool logarithm) {
  if (axis < 0) axis += x.shape.size();
  const Array largest =
      reduce(x, {axis}, true, [](const auto& v) { return v.empty() ? 0 : *std::max_element(v.begin(), v.end()); });
  const Array shifted = map(x, largest, [](double a, double b) { return a - b; });
  const Array total = reduce(map(shifted, [](double v) { return std::exp(v); }), {axis}, true, sum);
  return map(shifted, total, [=](double v, double t) { return logarithm ? v - std::log(t) : std::exp(v) / t; });
}

namespace {

/// Inserts axes of size 1 after the channels until there are three spatial axes.
Array with_three_axes(const Array& x) {
  Shape shape = x.shape;
  while (shape.size() < 5) shape.insert(2, 1);
  return reshaped(x, shape);
}

/// Removes the axes of size 1 that with_three_axes() inserted.
Array without_extra_axes(const Array& y, int64_t rank) {
  Shape shape = y.shape;
  while (shape.size() > rank) shape.erase(2);
  return reshaped(y, shape);
}

/// Calls visit(position) for every position in a box of `size`.
void for_box(const Triple& size, const std::function<void(const Triple& at)>& visit) {
  for (int64_t d = 0; d < size[0]; ++d)
    for (int64_t h = 0; h < size[1]; ++h)
      for (int64_t w = 0; w < size[2]; ++w) visit({d, h, w});
}

Triple spatial(const Array& x) { return {x.size(2), x.size(3), x.size(4)}; }

bool inside(const Triple& at, const Triple& size) {
  for (int i = 0; i < 3; ++i)
    if (at[i] < 0 || at[i] >= size[i]) return false;
  return true;
}

/// Returns an (n, channels, size) array that holds the bias of each channel, or 0.
Array filled_volume(int64_t n, int64_t channels, const Triple& size, const Array* bias) {
  return build({n, channels, size[0], size[1], size[2]},
               [&](const Dims& i) { return bias ? bias->values[static_cast<size_t>(i[1])] : 0.0; });
}

}  // namespace

Array conv(const Array& x_given, const Array& w_given, const Array* bias, const ConvOptions<3>& o) {
  const Array x = with_three_axes(x_given), w = with_three_axes(w_given);
  Triple size(0);
  for (int i = 0; i < 3; ++i)
    size[i] = (x.size(i + 2) + 2 * o.padding[i] - o.dilation[i] * (w.size(i + 2) - 1) - 1) / o.stride[i] + 1;
  Array y = filled_volume(x.size(0), w.size(0), size, bias);
  const int64_t in_group = w.size(1), out_group = w.size(0) / o.groups;
  for (int64_t n = 0; n < x.size(0); ++n)
    for (int64_t co = 0; co < w.size(0); ++co)
      for_box(size, [&](const Triple& at) {
        for (int64_t ci = 0; ci < in_group; ++ci)
          for_box(spatial(w), [&](const Triple& tap) {
            Triple from(0);
            for (int i = 0; i < 3; ++i) from[i] = at[i] * o.stride[i] - o.padding[i] + tap[i] * o.dilation[i];
            if (!inside(from, spatial(x))) return;
            const int64_t channel = co / out_group * in_group + ci;
            y({n, co, at[0], at[1], at[2]}) +=
                x({n, channel, from[0], from[1], from[2]}) * w({co, ci, tap[0], tap[1], tap[2]});
          });
      });
  return without_extra_axes(y, x_given.shape.size());
}

Array conv_transpose(const Array& x_given, const Array& w_given, const Array* bias, const ConvTransposeOptions<3>& o) {
  const Array x = with_three_axes(x_given), w = with_three_axes(w_given);
  Triple size(0);
  for (int i = 0; i < 3; ++i)
    size[i] = (x.size(i + 2) - 1) * o.stride[i] - 2 * o.padding[i] + o.dilation[i] * (w.size(i + 2) - 1) +
              o.output_padding[i] + 1;
  if (o.output_size) size = *o.output_size;
  const int64_t in_group = x.size(1) / o.groups, out_group = w.size(1);
  Array y = filled_volume(x.size(0), out_group * o.groups, size, bias);
  for (int64_t n = 0; n < x.size(0); ++n)
    for (int64_t ci = 0; ci < x.size(1); ++ci)
      for_box(spatial(x), [&](const Triple& from) {
        for (int64_t co = 0; co < out_group; ++co)
          for_box(spatial(w), [&](const Triple& tap) {
            Triple at(0);
            for (int i = 0; i < 3; ++i) at[i] = from[i] * o.stride[i] - o.padding[i] + tap[i] * o.dilation[i];
            if (!inside(at, size)) return;
            const int64_t channel = ci / in_group * out_group + co;
            y({n, channel, at[0], at[1], at[2]}) +=
                x({n, ci, from[0], from[1], from[2]}) * w({ci, co, tap[0], tap[1], tap[2]});
          });
      });
  return without_extra_axes(y, x_given.shape.size());
}

Array group_norm(const Array& x, int64_t groups, const Array* weight, const Array* bias, double eps) {
  const int64_t n = x.size(0), c = x.size(1);
  const int64_t in_group = n * c > 0 ? numel(x.shape) / (n * groups) : 0,
                per_channel = in_group * groups / std::max<int64_t>(c, 1);
  Array y = x;
  for (int64_t g = 0; g < n * groups; ++g) {
    const auto begin = x.values.begin() + g * in_group;
    const std::vector<double> values(begin, begin + in_group);
    const double center = mean(values);
    double variance = 0;
    for (double v : values) variance += (v - center) * (v - center) / static_cast<double>(in_group);
    for (int64_t i = 0; i < in_group; ++i) {
      const auto channel = static_cast<size_t>((g * in_group + i) / per_channel % c);
      const double normal = (values[static_cast<size_t>(i)] - center) / std::sqrt(variance + eps);
      y.values[static_cast<size_t>(g * in_group + i)] =
          normal * (weight ? weight->values[channel] : 1) + (bias ? bias->values[channel] : 0);
    }
  }
  return y;
}

Array layer_norm(const Array& x, int64_t axes, const Array* weight, const Array* bias, double eps) {
  int64_t inner = 1;
  for (int64_t i = 0; i < axes; ++i) inner *= x.shape[x.shape.size() - 1 - i];
  const int64_t rows = inner > 0 ? numel(x.shape) / inner : 0;
  Array y = group_norm(reshaped(x, {rows, 1, inner}), 1, nullptr, nullptr, eps);
  for (size_t i = 0; i < y.values.size(); ++i) {
    const size_t at = i % static_cast<size_t>(inner);
    y.values[i] = y.values[i] * (weight ? weight->values[at] : 1) + (bias ? bias->values[at] : 0);
  }
  return reshaped(y, x.shape);
}

namespace {

/// Returns the output size of a pooling along one axis.
int64_t pooled_size(int64_t in, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, bool ceil_mode) {
  const double room = static_cast<double>(in + 2 * padding - dilation * (kernel - 1) - 1);
  const double steps = room / static_cast<double>(stride);
  auto out = static_cast<int64_t>(ceil_mode ? std::ceil(steps) : std::floor(steps)) + 1;
  if (ceil_mode && (out - 1) * stride >= in + padding) --out;
  return out;
}

}  // namespace

Array max_pool(const Array& x, const MaxPoolOptions<3>& o, bool indices) {
  const Triple stride = o.stride.value_or(o.kernel_size);
  Shape shape = x.shape;
  for (int i = 0; i < 3; ++i)
    shape[i + 2] = pooled_size(x.size(i + 2), o.kernel_size[i], stride[i], o.padding[i], o.dilation[i], o.ceil_mode);
  return build(shape, [&](const Dims& index) {
    double best = -std::numeric_limits<double>::infinity();
    int64_t where = -1;
    for_box(o.kernel_size, [&](const Triple& tap) {
      Triple from(0);
      for (int i = 0; i < 3; ++i) from[i] = index[i + 2] * stride[i] - o.padding[i] + tap[i] * o.dilation[i];
      if (!inside(from, spatial(x))) return;
      const double value = x({index[0], index[1], from[0], from[1], from[2]});
      if (where >= 0 && !(value > best)) return;
      best = value;
      where = (from[0] * x.size(3) + from[1]) * x.size(4) + from[2];
    });
    return indices ? static_cast<double>(where) : best;
  });
}

Array avg_pool(const Array& x, const AvgPoolOptions<3>& o) {
  const Triple stride = o.stride.value_or(o.kernel_size);
  Shape shape = x.shape;
  for (int i = 0; i < 3; ++i)
    shape[i + 2] = pooled_size(x.size(i + 2), o.kernel_size[i], stride[i], o.padding[i], 1, o.ceil_mode);
  return build(shape, [&](const Dims& index) {
    double total = 0;
    int64_t in_padded = 0, in_input = 0;
    for_box(o.kernel_size, [&](const Triple& tap) {
      Triple from(0);
      bool padded = true;
      for (int i = 0; i < 3; ++i) {
        from[i] = index[i + 2] * stride[i] - o.padding[i] + tap[i];
        padded &= from[i] < x.size(i + 2) + o.padding[i];
      }
      in_padded += padded;
      if (!inside(from, spatial(x))) return;
      ++in_input;
      total += x({index[0], index[1], from[0], from[1], from[2]});
    });
    const int64_t divisor = o.count_include_pad ? in_padded : in_input;
    return total / static_cast<double>(o.divisor_override.value_or(divisor));
  });
}

Array interpolate(const Array& x, const InterpolateOptions& o) {
  Triple size(0);
  double step[3];
  for (int i = 0; i < 3; ++i) {
    const auto in = static_cast<double>(x.size(i + 2));
    size[i] = o.size ? o.size->values[o.size->values.size() == 1 ? 0 : i]
                     : static_cast<int64_t>(std::floor(in * (*o.scale_factor)[i]));
    const auto out = static_cast<double>(size[i]);
    step[i] = o.scale_factor ? 1 / (*o.scale_factor)[i] : in / out;
    if (o.align_corners) step[i] = size[i] > 1 ? (in - 1) / (out - 1) : 0;
    if (in == out) step[i] = 1;  // as in PyTorch, even if the scale factor is not 1
  }
  return build({x.size(0), x.size(1), size[0], size[1], size[2]}, [&](const Dims& index) {
    Triple low(0), high(0);
    double share[3] = {0, 0, 0};  // weight of the upper neighbor
    for (int i = 0; i < 3; ++i) {
      const auto at = static_cast<double>(index[i + 2]);
      const int64_t last = x.size(i + 2) - 1;
      if (o.mode <= InterpolateMode::nearest_exact) {
        const double center = o.mode == InterpolateMode::nearest ? 0 : 0.5;
        low[i] = high[i] = std::min(static_cast<int64_t>(std::floor((at + center) * step[i])), last);
        continue;
      }
      const double position = o.align_corners ? at * step[i] : std::max((at + 0.5) * step[i] - 0.5, 0.0);
      low[i] = std::min(static_cast<int64_t>(position), last);
      high[i] = std::min(low[i] + 1, last);
      share[i] = std::clamp(position - static_cast<double>(low[i]), 0.0, 1.0);
    }
    double total = 0;
    for_box({2, 2, 2}, [&](const Triple& corner) {
      double weight = 1;
      Triple from = low;
      for (int i = 0; i < 3; ++i) {
        weight *= corner[i] ? share[i] : 1 - share[i];
        if (corner[i]) from[i] = high[i];
      }
      total += weight * x({index[0], index[1], from[0], from[1], from[2]});
    });
    return total;
  });
}

}  // namespace voxgrad::reference
