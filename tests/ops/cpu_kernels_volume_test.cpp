// Tests the CPU kernels that combine several elements: reductions, softmax, matrix products, pooling, resampling and
// indexing.
#include <cmath>
#include <numeric>
#include <vector>

#include "core/thread_pool.h"
#include "ops/detail/resample_taps.h"
#include "tests/ops/cpu_kernels_support.h"

namespace voxgrad {
namespace {

using namespace kerneltest;

/// Returns `index` with 0 on every axis where `shape` has size 1.
Dims clipped(Dims index, const Shape& shape) {
  for (int64_t axis = 0; axis < index.size(); ++axis)
    if (shape[axis] == 1) index[axis] = 0;
  return index;
}

/// Reduces `in` to `shape` in double. The reduced axes have size 1 in `shape`.
template <class T>
Array<double> reduce_in_double(const Array<T>& in, const Shape& shape, ReduceOp op) {
  Array<double> totals(shape);
  cpu_table.fill(totals.view, op == ReduceOp::max ? -kInf : op == ReduceOp::min ? kInf : 0);
  const double count = op == ReduceOp::mean ? static_cast<double>(in.view.numel() / totals.view.numel()) : 1;
  in.visit([&](const Dims& i) {
    const double x = static_cast<double>(in(i));
    double& total = totals(clipped(i, shape));
    if (op == ReduceOp::sum || op == ReduceOp::mean)
      total += x / count;
    else if (std::isnan(x) || std::isnan(total))
      total = kNaN;
    else
      total = op == ReduceOp::max ? std::max(total, x) : std::min(total, x);
  });
  return totals;
}

TEST(CpuKernels, ReducesOverAnyAxes) {
  const Shape full{3, 5, 2, 37};
  for_all_floats([&]<class T>() {
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::max, ReduceOp::min})
      for (Layout layout : kInputLayouts)
        for (int mask = 0; mask < 16; ++mask) {
          Shape shape = full;
          for (int axis = 0; axis < 4; ++axis)
            if (mask >> axis & 1) shape[axis] = 1;
          Array<T> in(full, layout), out(shape, Layout::stepped);
          in.random(-3, 3);
          if (layout != Layout::expanded) in({1, 2, 0, 3}) = convert<T>(kNaN);
          cpu_table.reduce(op, out.view, in.view);
          const Array<double> want = reduce_in_double(in, shape, op);
          expect_close<T>(
              out, [&](const Dims& i) { return want(i); }, tolerance<T>());
        }
  });
  Array<bool> flags({5, 41}, Layout::reversed);
  Array<int64_t> counts({5, 1});
  flags.random(0, 0);
  flags({3, 7}) = flags({3, 9}) = true;
  cpu_table.reduce(ReduceOp::sum, counts.view, flags.view);
  expect_close<int64_t>(
      counts, [](const Dims& i) { return i[0] == 3 ? 2 : 0; }, 0);
}

TEST(CpuKernels, LongSumsKeepTheirAccuracy) {
  // If 2^20 terms were added to one float, most digits of each new term would be lost to rounding.
  const int64_t rows = 3, length = 1 << 20;
  for (Layout layout : {Layout::contiguous, Layout::reversed}) {
    Array<float> in({rows, length}, layout), out({rows, 1});
    in.random(0.5, 1.5);
    cpu_table.reduce(ReduceOp::sum, out.view, in.view);
    for (int64_t r = 0; r < rows; ++r) {
      double total = 0;
      for (int64_t i = 0; i < length; ++i) total += static_cast<double>(in({r, i}));
      EXPECT_NEAR(out({r, 0}), total, total * 1e-7);
    }
  }
}

TEST(CpuKernels, SoftmaxHandlesAnyAxis) {
  for_all_floats([]<class T>() {
    for (const Shape& shape : {Shape{3, 70, 5}, Shape{2, 3, 131}})
      for (Layout layout : kInputLayouts)
        for (int axis = 0; axis < 3; ++axis)
          for (bool logarithm : {false, true}) {
            Array<T> x(shape, layout), y(shape, layout == Layout::reversed ? Layout::reversed : Layout::stepped);
            x.random(-90, 90);
            cpu_table.softmax(y.view, x.view, axis, logarithm);
            const auto expected = [&](const Dims& i) {
              double total = 0;
              for (Dims k = i, end = i; end[axis] = 0, k = end, total == 0;)
                for (k[axis] = 0; k[axis] < shape[axis]; ++k[axis])
                  total += std::exp(static_cast<double>(x(k)) - static_cast<double>(x(i)));
              return logarithm ? -std::log(total) : 1 / total;
            };
            expect_close<T>(y, expected, 2 * tolerance<T>());
          }
  });
}

TEST(CpuKernels, MatmulHandlesAnyStrides) {
  for_all_floats([]<class T>() {
    for (const Shape& size :
         {Shape{3, 7, 5, 9}, Shape{1, 300, 33, 530}, Shape{2, 1, 40, 6}, Shape{2, 6, 40, 1}, Shape{2, 3, 0, 4}})
      for (Layout layout_a : kInputLayouts)
        for (Layout layout_b : {Layout::contiguous, Layout::reversed, Layout::flipped, Layout::expanded}) {
          Array<T> a({size[0], size[1], size[2]}, layout_a), b({size[0], size[2], size[3]}, layout_b);
          Array<T> c({size[0], size[1], size[3]});
          if (size[1] > 9 && (layout_a != Layout::contiguous || layout_b != Layout::reversed)) continue;
          a.random(-1, 1);
          b.random(-1, 1, 2);
          cpu_table.matmul(c.view, a.view, b.view);
          const auto expected = [&](const Dims& i) {
            double total = 0;
            for (int64_t k = 0; k < size[2]; ++k)
              total += static_cast<double>(a({i[0], i[1], k})) * static_cast<double>(b({i[0], k, i[2]}));
            return total;
          };
          expect_close<T>(c, expected, 4 * tolerance<T>());
        }
  });
}

TEST(CpuKernels, MaxPoolAndGradientMatchReference) {
  const PoolGeometry cases[] = {{{2, 2, 2}, {2, 2, 2}, {0, 0, 0}, {1, 1, 1}},
                                {{3, 2, 3}, {1, 2, 2}, {1, 0, 1}, {1, 3, 2}},
                                {{1, 3, 1}, {2, 1, 3}, {0, 1, 0}, {1, 1, 1}}};
  for_all_floats([&]<class T>() {
    for (const PoolGeometry& g : cases)
      for (Layout layout : {Layout::contiguous, Layout::reversed, Layout::flipped}) {
        const Shape in{2, 3, 7, 8, 9};
        Shape out = in;
        for (int i = 0; i < 3; ++i)
          out[i + 2] = (in[i + 2] + 2 * g.padding[i] - g.dilation[i] * (g.kernel_size[i] - 1) - 1) / g.stride[i] + 1;
        Array<T> x(in, layout), y(out, Layout::stepped), dy(out, layout), dx(in, Layout::stepped);
        Array<int64_t> indices(out);
        x.random(-9, 9).visit([&](const Dims& i) {
          x(i) = convert<T>(std::floor(static_cast<float>(x(i))));
        });  // rounded, so that ties occur
        x({1, 2, 3, 4, 5}) = convert<T>(kNaN);
        dy.random(-1, 1, 2);
        cpu_table.max_pool(y.view, &indices.view, x.view, g);
        cpu_table.max_pool_backward(dx.view, dy.view, indices.view, g);
        Array<int32_t> indices32(out, Layout::stepped);
        Array<T> dx_from_indices32(in), y_without_indices(out);
        cpu_table.max_pool(y.view, &indices32.view, x.view, g);
        cpu_table.max_pool(y_without_indices.view, nullptr, x.view, g);
        cpu_table.max_pool_backward(dx_from_indices32.view, dy.view, indices32.view, g);
        expect_close<int32_t>(
            indices32, [&](const Dims& o) { return static_cast<double>(indices(o)); }, 0);
        expect_close<T>(
            dx_from_indices32, [&](const Dims& i) { return static_cast<double>(dx(i)); }, 0);
        expect_close<T>(
            y_without_indices, [&](const Dims& o) { return static_cast<double>(y(o)); }, 0);

        std::vector<double> gradient(static_cast<size_t>(dx.view.numel()));
        const auto linear = [](const Dims& i) { return (i[2] * 8 + i[3]) * 9 + i[4]; };
        const auto all = [&](const Dims& i) { return static_cast<size_t>((i[0] * 3 + i[1]) * 504 + linear(i)); };
        const auto best_of = [&](const Dims& o) {
          Dims best;
          for (int64_t k = 0; k < g.kernel_size[0] * g.kernel_size[1] * g.kernel_size[2]; ++k) {
            const int64_t tap[] = {k / g.kernel_size[2] / g.kernel_size[1], k / g.kernel_size[2] % g.kernel_size[1],
                                   k % g.kernel_size[2]};
            Dims i = o;
            bool inside = true;
            for (int a = 0; a < 3; ++a) {
              i[a + 2] = o[a + 2] * g.stride[a] - g.padding[a] + tap[a] * g.dilation[a];
              inside &= i[a + 2] >= 0 && i[a + 2] < in[a + 2];
            }
            if (inside && (best.empty() || x(i) > x(best) || (x(i) != x(i) && x(best) == x(best)))) best = i;
          }
          return best;
        };
        y.visit([&](const Dims& o) { gradient[all(best_of(o))] += static_cast<double>(dy(o)); });
        expect_close<T>(
            y, [&](const Dims& o) { return static_cast<double>(x(best_of(o))); }, 0);
        expect_close<int64_t>(
            indices, [&](const Dims& o) { return static_cast<double>(linear(best_of(o))); }, 0);
        expect_close<T>(
            dx, [&](const Dims& i) { return gradient[all(i)]; }, tolerance<T>());
      }
  });
}

/// Returns the weight of input i in output o, where n is the number of inputs. Computes the weight from the definition
/// of map.mode.
double resample_entry(const Resample& map, int64_t o, int64_t i, int64_t n) {
  const double at = static_cast<double>(o);
  using enum Resample::Mode;
  if (map.mode == nearest || map.mode == nearest_exact)
    return static_cast<double>(i) ==
           std::min(std::floor((at + (map.mode == nearest ? 0 : 0.5)) * map.scale), static_cast<double>(n - 1));
  if (map.mode >= reflect) {
    int64_t from = o - map.padding;
    if (map.mode == circular) from = (from + n) % n;
    if (map.mode == replicate) from = std::clamp<int64_t>(from, 0, n - 1);
    if (map.mode == reflect) from = n - 1 - std::abs(n - 1 - std::abs(from));
    return i == from;
  }
  if (map.mode == adaptive) {
    const int64_t begin = o * n / map.outputs, end = ((o + 1) * n + map.outputs - 1) / map.outputs;
    return i >= begin && i < end ? 1.0 / static_cast<double>(end - begin) : 0;
  }
  if (map.mode == cubic) {  // positions outside the input add their weights to the border element
    const double s = map.align_corners ? at * map.scale : (at + 0.5) * map.scale - 0.5;
    double weight = 0;
    for (int64_t tap = -4; tap < n + 4; ++tap) {
      const double d = std::abs(s - static_cast<double>(tap)), a = -0.75;
      if (std::clamp<int64_t>(tap, 0, n - 1) != i || d >= 2) continue;
      weight += d < 1 ? (a + 2) * d * d * d - (a + 3) * d * d + 1 : a * (d * d * d - 5 * d * d + 8 * d - 4);
    }
    return weight;
  }
  if (map.mode == linear) {
    double s = map.align_corners ? at * map.scale : std::max((at + 0.5) * map.scale - 0.5, 0.0);
    s = std::min(s, static_cast<double>(n - 1));
    return std::max(0.0, 1 - std::abs(s - static_cast<double>(i)));
  }
  const int64_t start = o * map.stride - map.padding, end = start + map.kernel;
  if (i < start || i >= end) return 0;
  if (map.weight != 0) return map.weight;
  const int64_t counted =
      map.count_include_pad ? std::min(end, n + map.padding) - start : std::min(end, n) - std::max<int64_t>(start, 0);
  return 1.0 / static_cast<double>(counted);
}

/// A resampling map along one axis, and the sizes of its input and output.
struct ResampleCase {
  Resample map;
  int64_t inputs;
  int64_t outputs;
};

std::vector<ResampleCase> resample_cases() {
  using enum Resample::Mode;
  std::vector<ResampleCase> cases = {
      {{}, 3, 3},
      {{.mode = nearest, .scale = 0.5}, 4, 8},
      {{.mode = nearest, .scale = 7.0 / 3}, 7, 3},
      {{.mode = nearest_exact, .scale = 5.0 / 7}, 5, 7},
      {{.mode = linear, .scale = 0.5}, 4, 8},
      {{.mode = linear, .scale = 7.0 / 3}, 7, 3},
      {{.mode = linear, .scale = 1 / 1.7}, 5, 8},
      {{.mode = linear, .align_corners = true, .scale = 4.0 / 8}, 5, 9},
      {{.mode = linear, .align_corners = true, .scale = 0}, 5, 1},
      {{.mode = linear, .scale = 0.25}, 1, 4},
      {{.mode = cubic, .scale = 0.5}, 4, 8},
      {{.mode = cubic, .scale = 0.25}, 2, 8},
      {{.mode = cubic, .scale = 7.0 / 3}, 7, 3},
      {{.mode = cubic, .align_corners = true, .scale = 5.0 / 3}, 6, 4},
      {{.mode = cubic, .align_corners = true, .scale = 0}, 3, 1},
      {{.mode = box, .kernel = 3, .stride = 2, .padding = 1}, 7, 4},
      // ceil mode: the last box extends beyond the padding
      {{.mode = box, .kernel = 3, .stride = 2, .padding = 1}, 8, 5},
      {{.mode = box, .count_include_pad = false, .kernel = 3, .stride = 2, .padding = 1}, 8, 5},
      {{.mode = box, .kernel = 2, .stride = 3, .weight = -0.3}, 8, 3},
      {{.mode = adaptive, .count_include_pad = false, .outputs = 3}, 7, 3},
      {{.mode = adaptive, .count_include_pad = false, .outputs = 7}, 3, 7},
      {{.mode = reflect, .padding = 2}, 3, 7},
      {{.mode = reflect, .padding = -1}, 6, 7},
      {{.mode = replicate, .padding = 3}, 2, 7},
      {{.mode = circular, .padding = 3}, 3, 8},
  };
  return cases;
}

TEST(CpuKernels, ResampleAndTransposeMatchReference) {
  const std::vector<ResampleCase> cases = resample_cases();
  for_all_floats([&]<class T>() {
    for (size_t number = 0; number < cases.size(); ++number)
      for (Layout layout : {Layout::contiguous, Layout::reversed, Layout::flipped})
        for (bool transposed : {false, true}) {
          ResampleMaps maps;
          Shape in_shape{2, 3, 1, 1, 1}, out_shape = in_shape;
          int64_t n[3];
          for (size_t i = 0; i < 3; ++i) {
            const ResampleCase& c = cases[(number + i * 7) % cases.size()];
            const auto axis = static_cast<int64_t>(i) + 2;
            maps[i] = c.map;
            n[i] = c.inputs;
            in_shape[axis] = transposed ? c.outputs : c.inputs;
            out_shape[axis] = transposed ? c.inputs : c.outputs;
          }
          Array<T> in(in_shape, layout), out(out_shape, Layout::stepped);
          in.random(-1, 1);
          cpu_table.resample(out.view, in.view, maps, transposed);
          const auto entry = [&](int i, int64_t from, int64_t to) {
            return transposed ? resample_entry(maps[static_cast<size_t>(i)], from, to, n[i])
                              : resample_entry(maps[static_cast<size_t>(i)], to, from, n[i]);
          };
          const auto expected = [&](const Dims& o) {
            double total = 0;
            Dims i = o;
            for (i[2] = 0; i[2] < in_shape[2]; ++i[2])
              for (i[3] = 0; i[3] < in_shape[3]; ++i[3])
                for (i[4] = 0; i[4] < in_shape[4]; ++i[4])
                  total +=
                      static_cast<double>(in(i)) * entry(0, i[2], o[2]) * entry(1, i[3], o[3]) * entry(2, i[4], o[4]);
            return total;
          };
          expect_close<T>(out, expected, 2 * tolerance<T>());
        }
  });
}

// The CUDA kernels allocate a buffer for max_terms() terms per output, so no output may have more terms.
TEST(Resample, OutputsHaveAtMostMaxTerms) {
  std::vector<ResampleCase> cases = resample_cases();
  for (const auto mode : {Resample::Mode::nearest, Resample::Mode::nearest_exact, Resample::Mode::linear,
                          Resample::Mode::cubic, Resample::Mode::adaptive, Resample::Mode::box})
    for (int64_t inputs = 1; inputs < 20; ++inputs)
      for (int64_t outputs = 1; outputs < 60; ++outputs) {
        Resample map{.mode = mode, .scale = static_cast<double>(inputs) / static_cast<double>(outputs)};
        map.outputs = outputs;
        map.kernel = 1 + outputs % 5;
        map.stride = 1 + outputs % 3;
        cases.push_back({map, inputs, mode == Resample::Mode::box ? (inputs - 1) / map.stride + 1 : outputs});
        map.align_corners = outputs > 1 && mode >= Resample::Mode::linear;
        if (outputs > 1) map.scale = static_cast<double>(inputs - 1) / static_cast<double>(outputs - 1);
        if (map.align_corners) cases.push_back({map, inputs, cases.back().outputs});
      }
  for (const auto& [map, inputs, outputs] : cases)
    for (const bool transposed : {false, true}) {
      const int64_t max_count = max_terms(map, transposed, inputs, outputs);
      int64_t terms[2] = {};
      for (int64_t o = 0; o < (transposed ? inputs : outputs); ++o) {
        int64_t count = 0;
        for_terms(map, transposed, o, inputs, outputs, [&](int64_t, double) { ++count; });
        EXPECT_LE(count, max_count) << static_cast<int>(map.mode) << ": " << inputs << " to " << outputs << ", "
                                    << transposed;
        terms[0] += count;
      }
      for (int64_t o = 0; o < (transposed ? outputs : inputs); ++o)
        for_terms(map, !transposed, o, inputs, outputs, [&](int64_t, double) { ++terms[1]; });
      EXPECT_EQ(terms[0], terms[1]) << static_cast<int>(map.mode) << ": " << inputs << " to " << outputs;
    }
}

TEST(CpuKernels, NearestSelectsInputByExactRatio) {
  for (int64_t inputs : {2, 3, 7})
    for (int64_t outputs = 1; outputs < 400; ++outputs) {
      Array<float> in({1, 1, 1, 1, inputs}), out({1, 1, 1, 1, outputs});
      in.visit([&](const Dims& i) { in(i) = static_cast<float>(i[4]); });
      const double scale = static_cast<double>(inputs) / static_cast<double>(outputs);  // has a rounding error
      cpu_table.resample(out.view, in.view, {Resample{}, Resample{}, {.mode = Resample::Mode::nearest, .scale = scale}},
                         false);
      expect_close<float>(
          out, [&](const Dims& i) { return static_cast<double>(i[4] * inputs / outputs); }, 0);
    }
}

TEST(CpuKernels, GatherAndScatterAddMatchReference) {
  for_all_floats([]<class T>() {
    for (Layout layout : kInputLayouts)
      for (int axis = 0; axis < 3; ++axis) {
        Shape picked{4, 5, 6};
        picked[axis] = 9;
        Array<T> in({4, 5, 6}, layout), out(picked, Layout::stepped), back({4, 5, 6}, Layout::reversed);
        Array<int64_t> index(picked, layout == Layout::contiguous ? Layout::expanded : layout);
        in.random(-1, 1);
        index.random(0, static_cast<double>(in.view.size[axis]) - 0.01);
        cpu_table.gather("gather", out.view, in.view, index.view, axis);
        const auto moved = [&](Dims i) {
          i[axis] = index(i);
          return i;
        };
        expect_close<T>(
            out, [&](const Dims& i) { return static_cast<double>(in(moved(i))); }, 0);

        cpu_table.scatter_add("scatter_add", back.view, out.view, index.view, axis);
        Array<double> sums({4, 5, 6});
        sums.random(0, 0);
        out.visit([&](const Dims& i) { sums(moved(i)) += static_cast<double>(out(i)); });
        expect_close<T>(
            back, [&](const Dims& i) { return sums(i); }, tolerance<T>());

        index(Dims::filled(3, 1)) = in.view.size[axis];
        EXPECT_ERROR(cpu_table.gather("gather", out.view, in.view, index.view, axis), "is out of range for axis");
        EXPECT_ERROR(cpu_table.scatter_add("scatter_add", back.view, out.view, index.view, axis),
                     "is out of range for axis");
      }
  });
}

}  // namespace
}  // namespace voxgrad
