// Group normalisation, forward and backward: sums of every channel, then coefficients of every channel, then one
// elementwise pass.
//
// Statistics are taken block by block in two sweeps through the first-level cache, and blocks, then channels, are
// joined by Chan, Golub and LeVeque's update ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979): one pass over memory, and no difference of large squares. Elements are converted as they are
// loaded and stored; sums are in double, coefficients in compute_t.
#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/norm_activations.h"

namespace voxgrad::cpu {
namespace {

/// Elements that one thread takes at a time, and elements that stay in the first-level cache.
constexpr int64_t kSlab = 65536;
constexpr int64_t kBlock = 2048;

/// Some rows of one sample: where the channels lie innermost, all channels at some positions, a position a row; else
/// some positions of one channel in a single row. `sums` is where its first channel's sums belong.
struct Slab {
  int64_t sample, channel, position, rows, columns, sums;
};

/// How (N, C, L) is cut into slabs; the same for all views of one call, chosen by x.
struct Slabs {
  int64_t samples, channels, length, positions, chunks;  // positions of a slab; slabs along L
  bool channels_inner;

  explicit Slabs(const View& x)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        channels_inner(channels > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2])) {
    positions = channels_inner ? std::max<int64_t>(1, kSlab / channels) : kSlab;
    chunks = (length + positions - 1) / positions;
  }

  /// Calls f(slab) for all, in parallel.
  template <class F>
  void for_each(F&& f) const {
    const int64_t lines = channels_inner ? 1 : channels;
    parallel_for(samples * lines * chunks,
                 grain_of(std::min(positions, length) * channels / std::max<int64_t>(1, lines)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t chunk = i % chunks, channel = i / chunks % lines, sample = i / chunks / lines;
                     const int64_t first = chunk * positions, count = std::min(positions, length - first);
                     f(Slab{sample, channel, first, channels_inner ? count : 1, channels_inner ? channels : count,
                            (sample * chunks + chunk) * channels + channel});
                   }
                 });
  }
  /// The number of sums: a set of `channels` for each slab along L of each sample.
  size_t sums() const { return static_cast<size_t>(samples * chunks * channels); }

  template <class T>
  T* row(const View& v, const Slab& slab, int64_t r) const {
    return v.as<T>() + slab.sample * v.stride[0] + slab.channel * v.stride[1] + slab.position * v.stride[2] +
           (channels_inner ? r * v.stride[2] : 0);
  }
  int64_t step(const View& v) const { return v.stride[channels_inner ? 1 : 2]; }
};

/// The element of `v`, the shape of the groups, that belongs to group number i.
template <class T>
T& at(const View& v, int64_t i) {
  return v.as<T>()[i / v.size[1] * v.stride[0] + i % v.size[1] * v.stride[1]];
}

/// The channels of one group, in one sample or in all.
struct Group {
  int64_t number, sample, samples, channel, channels;

  int64_t lines() const { return samples * channels; }
  /// Calls f(n, c) for its lines.
  template <class F>
  void for_each(F&& f) const {
    for (int64_t n = sample; n < sample + samples; ++n)
      for (int64_t c = channel; c < channel + channels; ++c) f(n, c);
  }
};

/// Entry c of a vector of dtype T or compute_t<T>, which may be missing.
template <class T>
double entry(const View* v, int64_t c, double otherwise) {
  if (!v) return otherwise;
  if (v->dtype == dtype_of<T>) return convert<double>(v->as<T>()[c * v->stride[0]]);
  return static_cast<double>(v->as<compute_t<T>>()[c * v->stride[0]]);
}
template <class T>
void set_entry(const View* v, int64_t c, double value) {
  if (!v) return;
  if (v->dtype == dtype_of<T>)
    v->as<T>()[c * v->stride[0]] = convert<T>(value);
  else
    v->as<compute_t<T>>()[c * v->stride[0]] = static_cast<compute_t<T>>(value);
}

struct Moments {
  double count = 0, mean = 0, squares = 0;  // squares: the sum of squared deviations

  void join(const Moments& other) {
    if (other.count == 0) return;
    const double delta = other.mean - mean, total = count + other.count;
    mean += delta * (other.count / total);
    squares += other.squares + delta * delta * (count * other.count / total);
    count = total;
  }
};

/// before(v), as the statistics take it.
template <class T, class Activations>
double before(const Activations& activations, T v) {
  if constexpr (std::is_same_v<Activations, NoActivations>) return convert<double>(v);
  return convert<double>(activations.before.value(convert<compute_t<T>>(v)));
}

/// Adds the positions of one channel.
template <class T, class Activations>
void add_row(Moments& moments, const T* x, int64_t step, int64_t count, const Activations& activations) {
  RowBuffer<T> buffer;
  for (int64_t i = 0; i < count; i += kRowPiece) {
    const int64_t n = std::min(kRowPiece, count - i);
    const T* v = packed(x + i * step, step, n, buffer.data());
    Moments block{static_cast<double>(n)};
    block.mean = sum_lanes(n, [v, &activations](int64_t j) { return before(activations, v[j]); }) / block.count;
    block.squares = sum_lanes(n, [v, mean = block.mean, &activations](int64_t j) {
      const double d = before(activations, v[j]) - mean;
      return d * d;
    });
    moments.join(block);
  }
}

/// Adds `rows` positions of all channels, side by side.
template <class T, class Activations>
void add_columns(Moments* moments, const T* x, int64_t row_step, int64_t step, int64_t rows, int64_t columns,
                 const Activations& activations) {
  std::vector<double> means(static_cast<size_t>(columns)), squares(means.size());
  const int64_t block_rows = std::max<int64_t>(1, kBlock / columns);
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t n = std::min(block_rows, rows - first);
    double *mean = means.data(), *square = squares.data();
    const auto sweep = [&](double* sums, auto f) {
      std::fill_n(sums, columns, 0.0);
      for (int64_t r = first; r < first + n; ++r) {
        const T* v = x + r * row_step;
        if (step == 1)
          for (int64_t c = 0; c < columns; ++c) sums[c] += f(before(activations, v[c]), c);
        else
          for (int64_t c = 0; c < columns; ++c) sums[c] += f(before(activations, v[c * step]), c);
      }
    };
    const double count = static_cast<double>(n);
    sweep(mean, [](double v, int64_t) { return v; });
    for (int64_t c = 0; c < columns; ++c) mean[c] /= count;
    sweep(square, [mean](double v, int64_t c) { return (v - mean[c]) * (v - mean[c]); });
    for (int64_t c = 0; c < columns; ++c) moments[c].join({count, mean[c], square[c]});
  }
}

/// out = f(coefficients of the channel, in...) everywhere, in compute_t<T>; coefficients by sample and channel.
template <class T, class K, class F, class... Views>
void map_channels(const Slabs& slabs, const std::vector<K>& coefficients, F&& f, const View& out, const Views&... in) {
  const auto value = [&f](const K& k, auto... x) { return convert<T>(f(k, convert<compute_t<T>>(x)...)); };
  slabs.for_each([&](const Slab& slab) {
    const int64_t out_step = slabs.step(out);
    const bool contiguous = out_step == 1 && ((slabs.step(in) == 1) && ...);
    const K* k = coefficients.data() + slab.sample * slabs.channels + slab.channel;
    for (int64_t r = 0; r < slab.rows; ++r) {
      T* y = slabs.template row<T>(out, slab, r);
      const auto contiguous_row = [&](const auto*... x) {
        if (slabs.channels_inner) {
          VG_INDEPENDENT
          for (int64_t j = 0; j < slab.columns; ++j) y[j] = value(k[j], x[j]...);
        } else {
          const K same = *k;
          VG_INDEPENDENT
          for (int64_t j = 0; j < slab.columns; ++j) y[j] = value(same, x[j]...);
        }
      };
      if (contiguous) {
        contiguous_row(slabs.template row<const T>(in, slab, r)...);
      } else {
        for (int64_t j = 0; j < slab.columns; ++j)
          y[j * out_step] =
              value(slabs.channels_inner ? k[j] : *k, slabs.template row<const T>(in, slab, r)[j * slabs.step(in)]...);
      }
    }
  });
}

/// sums (C) of f(in...), in double.
template <class T, class F, class... Views>
void sum_channels(const Slabs& slabs, const View& sums, F&& f, const Views&... in) {
  std::vector<double> parts(slabs.sums());
  slabs.for_each([&](const Slab& slab) {
    double* into = parts.data() + slab.sums;
    for (int64_t r = 0; r < slab.rows; ++r) {
      const auto element = [&f, rows = std::tuple(slabs.template row<const T>(in, slab, r)...),
                            steps = std::tuple(slabs.step(in)...)](int64_t j) {
        return [&]<size_t... k>(std::index_sequence<k...>) {
          return f(convert<double>(std::get<k>(rows)[j * std::get<k>(steps)])...);
        }
        (std::index_sequence_for<Views...>());
      };
      if (slabs.channels_inner)
        for (int64_t c = 0; c < slab.columns; ++c) into[c] += element(c);
      else
        *into += sum_lanes(slab.columns, element);
    }
  });
  for (int64_t c = 0; c < slabs.channels; ++c) {
    double total = 0;
    for (int64_t row = 0; row < slabs.samples * slabs.chunks; ++row)
      total += parts[static_cast<size_t>(row * slabs.channels + c)];
    set_entry<T>(&sums, c, total);
  }
}

/// Calls f(Group) for every group, in parallel. `shape` (N, groups), or (1, groups): over all samples.
template <class F>
void for_each_group(const Slabs& slabs, const View& shape, F&& f) {
  const int64_t groups = shape.size[1], per = groups > 0 ? slabs.channels / groups : 0;
  const int64_t samples = shape.size[0] == slabs.samples ? 1 : slabs.samples;
  parallel_for(shape.size[0] * groups, grain_of(16 * per * samples * slabs.chunks), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(Group{i, i / groups, samples, i % groups * per, per});
  });
}

/// y = (x - mean) * rstd * gamma + beta, the mean in two parts: subtracting it costs no accuracy even where it is large
/// beside the deviations.
template <class T>
struct Affine {
  using Wide = compute_t<T>;
  Wide high, low, factor, term;

  Affine() = default;
  Affine(double mean, double rstd, double gamma, double beta)
      : high(static_cast<Wide>(mean)),
        low(static_cast<Wide>(mean - static_cast<double>(high))),
        factor(static_cast<Wide>(rstd * gamma)),
        term(static_cast<Wide>(beta)) {}
  Wide operator()(Wide x) const { return ((x - high) - low) * factor + term; }
};

/// y = after((before(x) - mean) * rstd * gamma + beta), with {mean, rstd} = statistics(group); `groups` has their
/// shape.
template <class T, class Activations, class F>
void normalise(const Slabs& slabs, const View& y, const View& x, const View& groups, const View* gamma,
               const View* beta, const Activations& a, F&& statistics) {
  std::vector<Affine<T>> affine(static_cast<size_t>(slabs.samples * slabs.channels));
  for_each_group(slabs, groups, [&](const Group& group) {
    const std::pair<double, double> own = statistics(group);
    group.for_each([&](int64_t n, int64_t c) {
      affine[static_cast<size_t>(n * slabs.channels + c)] = {own.first, own.second, entry<T>(gamma, c, 1),
                                                             entry<T>(beta, c, 0)};
    });
  });
  map_channels<T>(
      slabs, affine, [a](const Affine<T>& f, compute_t<T> v) { return a.after.value(f(a.before.value(v))); }, y, x);
}

template <class T, class Activations>
void forward(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
             double eps, const Activations& activations) {
  using Wide = compute_t<T>;
  const Slabs slabs(x);
  std::vector<Moments> moments(slabs.sums());
  slabs.for_each([&](const Slab& slab) {
    Moments* into = moments.data() + slab.sums;
    const T* first = slabs.template row<const T>(x, slab, 0);
    if (slabs.channels_inner)
      add_columns(into, first, x.stride[2], slabs.step(x), slab.rows, slab.columns, activations);
    else
      add_row(*into, first, slabs.step(x), slab.columns, activations);
  });
  normalise<T>(slabs, y, x, mean, gamma, beta, activations, [&](const Group& group) {
    Moments total;
    for (int64_t chunk = 0; chunk < slabs.chunks; ++chunk)
      group.for_each([&](int64_t n, int64_t c) {
        total.join(moments[static_cast<size_t>((n * slabs.chunks + chunk) * slabs.channels + c)]);
      });
    const double scale = 1 / std::sqrt(total.squares / std::max(total.count, 1.0) + eps);
    at<Wide>(mean, group.number) = static_cast<Wide>(total.mean);
    at<Wide>(rstd, group.number) = static_cast<Wide>(scale);
    return std::pair(total.mean, scale);
  });
}

/// With v = before(x) and g, the gradient of the normalised value: sums of g, of g * (v - mean) and of v - mean. The
/// stored mean is rounded; the last sum tells by how much.
struct GradientSums {
  double g = 0, g_centred = 0, centred = 0;

  void join(const GradientSums& other) {
    g += other.g;
    g_centred += other.g_centred;
    centred += other.centred;
  }
};

/// The normalisation of a channel as the forward pass computed it, (v - mean) * factor + term, and its gradient.
template <class T, class Activations>
struct ChannelNorm {
  using Wide = compute_t<T>;
  Wide mean, factor, term;

  Wide centred(const Activations& a, T x) const { return a.before.value(convert<Wide>(x)) - mean; }
  Wide gradient(const Activations& a, T dy, Wide centred) const {
    return a.after.gradient(convert<Wide>(dy), centred * factor + term);
  }
};

/// Adds one row of a slab: to sums[0] if it belongs to one channel, norm[0], else to each channel's.
template <class T, class Activations>
void add_gradient_row(const Slabs& slabs, const Slab& slab, int64_t r, const View& dy, const View& x,
                      const ChannelNorm<T, Activations>* norm, const Activations& a, GradientSums* sums) {
  RowBuffer<T> dy_buffer, x_buffer;
  for (int64_t j = 0; j < slab.columns; j += kRowPiece) {
    const int64_t n = std::min(kRowPiece, slab.columns - j), dy_step = slabs.step(dy), x_step = slabs.step(x);
    const T* d = packed(slabs.template row<const T>(dy, slab, r) + j * dy_step, dy_step, n, dy_buffer.data());
    const T* v = packed(slabs.template row<const T>(x, slab, r) + j * x_step, x_step, n, x_buffer.data());
    if (slabs.channels_inner) {
      for (int64_t i = 0; i < n; ++i) {
        const auto centred = norm[j + i].centred(a, v[i]), g = norm[j + i].gradient(a, d[i], centred);
        sums[j + i].join({double{g}, double{g} * double{centred}, double{centred}});
      }
    } else {  // once from memory, three times from the cache
      const auto centred = [v, &a, m = *norm](int64_t i) { return m.centred(a, v[i]); };
      const auto g = [d, &a, m = *norm, centred](int64_t i) { return double{m.gradient(a, d[i], centred(i))}; };
      sums->join({sum_lanes(n, g), sum_lanes(n, [=](int64_t i) { return g(i) * double{centred(i)}; }),
                  sum_lanes(n, [=](int64_t i) { return double{centred(i)}; })});
    }
  }
}

template <class T, class Activations>
void backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean, const View& rstd,
              const View* gamma, const View* beta, const Activations& activations) {
  using Wide = compute_t<T>;
  using Norm = ChannelNorm<T, Activations>;
  const Slabs slabs(x);
  const int64_t lines = slabs.samples * slabs.channels;
  std::vector<Norm> norms(static_cast<size_t>(lines));
  const auto line = [&](int64_t n, int64_t c) { return static_cast<size_t>(n * slabs.channels + c); };
  for_each_group(slabs, mean, [&](const Group& group) {
    group.for_each([&](int64_t n, int64_t c) {
      norms[line(n, c)] = {at<Wide>(mean, group.number),
                           static_cast<Wide>(double{at<Wide>(rstd, group.number)} * entry<T>(gamma, c, 1)),
                           static_cast<Wide>(entry<T>(beta, c, 0))};
    });
  });
  std::vector<GradientSums> parts(slabs.sums()), sums(static_cast<size_t>(lines));
  slabs.for_each([&](const Slab& slab) {
    for (int64_t r = 0; r < slab.rows; ++r)
      add_gradient_row<T>(slabs, slab, r, dy, x, norms.data() + slab.sample * slabs.channels + slab.channel,
                          activations, parts.data() + slab.sums);
  });

  struct Coefficients {
    Norm norm;
    Wide low, slope, offset;
  };
  std::vector<Coefficients> coefficients(static_cast<size_t>(lines));
  for_each_group(slabs, mean, [&](const Group& group) {
    const double scale = double{at<Wide>(rstd, group.number)};
    const double count = static_cast<double>(std::max<int64_t>(1, group.lines() * slabs.length));
    double low = 0;
    group.for_each([&](int64_t n, int64_t c) {
      GradientSums& own = sums[line(n, c)];
      for (int64_t chunk = 0; chunk < slabs.chunks; ++chunk)
        own.join(parts[static_cast<size_t>((n * slabs.chunks + chunk) * slabs.channels + c)]);
      low += own.centred / count;
    });
    // With h = gamma * g and n = (v - mean) * rstd: dv = rstd * (h - mean(h) - n * mean(h * n)).
    double mean_h = 0, mean_hn = 0;
    group.for_each([&](int64_t n, int64_t c) {
      GradientSums& own = sums[line(n, c)];
      const double weight = entry<T>(gamma, c, 1);
      own.g_centred = (own.g_centred - low * own.g) * scale;
      mean_h += weight * own.g / count;
      mean_hn += weight * own.g_centred / count;
    });
    group.for_each([&](int64_t n, int64_t c) {
      coefficients[line(n, c)] = {norms[line(n, c)], static_cast<Wide>(low),
                                  static_cast<Wide>(-scale * scale * mean_hn), static_cast<Wide>(-scale * mean_h)};
    });
  });
  map_channels<T>(
      slabs, coefficients,
      [a = activations](const Coefficients& k, Wide d, Wide v) {
        const Wide centred = a.before.value(v) - k.norm.mean;
        const Wide g = a.after.gradient(d, centred * k.norm.factor + k.norm.term);
        return a.before.gradient(g * k.norm.factor + ((centred - k.low) * k.slope + k.offset), v);
      },
      out.dx, dy, x);

  for (int64_t c = 0; c < slabs.channels; ++c) {
    GradientSums total;
    for (int64_t n = 0; n < slabs.samples; ++n) total.join(sums[static_cast<size_t>(n * slabs.channels + c)]);
    set_entry<T>(out.dbeta, c, total.g);
    set_entry<T>(out.dgamma, c, total.g_centred);
  }
  if (out.sums) sum_channels<T>(slabs, *out.sums, std::identity(), out.dx);
}

}  // namespace

void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps, const NormActivations& activations) {
  dispatch(Floats(), x.dtype, "group_norm", "CPU", [&]<class T>() {
    with_activations<T>(activations, [&](const auto& a) { forward<T>(y, mean, rstd, x, gamma, beta, eps, a); });
  });
}

void normalize(const View& y, const View& x, const View& mean, const View& rstd, const View* gamma, const View* beta) {
  dispatch(Floats(), x.dtype, "normalize", "CPU", [&]<class T>() {
    normalise<T>(Slabs(x), y, x, mean, gamma, beta, NoActivations({}), [&](const Group& group) {
      const auto given = [&](const View& v) { return static_cast<double>(at<compute_t<T>>(v, group.number)); };
      return std::pair(given(mean), given(rstd));
    });
  });
}

void group_norm_backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                         const View& rstd, const View* gamma, const View* beta, const NormActivations& activations) {
  dispatch(Floats(), x.dtype, "group_norm_backward", "CPU", [&]<class T>() {
    with_activations<T>(activations, [&](const auto& a) { backward<T>(out, dy, x, mean, rstd, gamma, beta, a); });
  });
}

void relu_bias_backward(const View& dz, const View& dbias, const View& dy, const View& y) {
  binary(BinaryOp::relu_grad, dz, dy, y, 0, 0);
  dispatch(Floats(), y.dtype, "relu_bias_backward", "CPU",
           [&]<class T>() { sum_channels<T>(Slabs(y), dbias, std::identity(), dz); });
}

namespace {

/// The weight's entry for each channel of each sample.
template <class T>
std::vector<compute_t<T>> slopes(const Slabs& slabs, const View& weight) {
  std::vector<compute_t<T>> result(static_cast<size_t>(slabs.samples * slabs.channels));
  for (size_t i = 0; i < result.size(); ++i)
    result[i] = static_cast<compute_t<T>>(entry<T>(&weight, static_cast<int64_t>(i) % slabs.channels, 0));
  return result;
}

}  // namespace

void prelu(const View& y, const View& x, const View& weight) {
  dispatch(Floats(), x.dtype, "prelu", "CPU", [&]<class T>() {
    using Wide = compute_t<T>;
    const Slabs slabs(x);
    map_channels<T>(
        slabs, slopes<T>(slabs, weight), [](Wide slope, Wide v) { return v > 0 ? v : slope * v; }, y, x);
  });
}

void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight) {
  dispatch(Floats(), x.dtype, "prelu_backward", "CPU", [&]<class T>() {
    using Wide = compute_t<T>;
    const Slabs slabs(x);
    map_channels<T>(
        slabs, slopes<T>(slabs, weight), [](Wide slope, Wide d, Wide v) { return v > 0 ? d : slope * d; }, dx, dy, x);
    sum_channels<T>(
        slabs, dweight, [](double d, double v) { return v > 0 ? 0 : d * v; }, dy, x);
  });
}

void track_statistics(const View* running_mean, const View* running_var, const View& mean, const View& rstd, double eps,
                      double unbiased, double momentum) {
  dispatch(Types<float, double>(), mean.dtype, "track_statistics", "CPU", [&]<class T>() {
    for (int64_t c = 0; c < mean.size[1]; ++c) {
      const double scale = double{at<T>(rstd, c)}, variance = std::max(1 / (scale * scale) - eps, 0.0) * unbiased;
      const auto move = [&](const View* running, double value) {
        if (!running) return;
        dispatch(Floats(), running->dtype, "track_statistics", "CPU", [&]<class R>() {
          const double own = entry<R>(running, c, 0);
          set_entry<R>(running, c, own + momentum * (value - own));
        });
      };
      move(running_mean, double{at<T>(mean, c)});
      move(running_var, variance);
    }
  });
}

}  // namespace voxgrad::cpu
