// Group normalisation, forward and backward: sums of every channel, then coefficients of every channel, then one
// elementwise pass.
//
// Statistics are taken block by block in two sweeps through the first-level cache, and blocks, then channels, are
// joined by Chan, Golub and LeVeque's update ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979): one pass over memory, and no difference of large squares. Elements are converted as they are
// loaded and stored; sums are in double, coefficients in compute_t.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "ops/cpu/slabs.h"
#include "ops/detail/norm_activations.h"

namespace voxgrad::cpu {
namespace {

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
  return static_cast<double>(activations.before.value(v));
}

/// Adds a slab of one channel.
template <class T, class Activations>
void add_row(Moments& moments, const Slabs& slabs, const RowOperand& x, const Slab& slab,
             const Activations& activations) {
  RowBuffer buffer;
  for (int64_t i = 0; i < slab.columns; i += kRowPiece) {
    const int64_t n = std::min(kRowPiece, slab.columns - i);
    const T* v = load<T>(slabs, x, slab, 0, i, n, buffer);
    Moments block{static_cast<double>(n)};
    block.mean = sum_lanes(n, [v, &activations](int64_t j) { return before(activations, v[j]); }) / block.count;
    block.squares = sum_lanes(n, [v, mean = block.mean, &activations](int64_t j) {
      const double d = before(activations, v[j]) - mean;
      return d * d;
    });
    moments.join(block);
  }
}

/// Adds a slab of all channels, side by side.
template <class T, class Activations>
void add_columns(Moments* moments, const Slabs& slabs, const RowOperand& x, const Slab& slab,
                 const Activations& activations) {
  const int64_t columns = slab.columns;
  std::vector<double> means(static_cast<size_t>(columns)), squares(means.size());
  RowBuffer buffer;
  const int64_t block_rows = std::max<int64_t>(1, kBlock / columns);
  for (int64_t first = 0; first < slab.rows; first += block_rows) {
    const int64_t n = std::min(block_rows, slab.rows - first);
    double *mean = means.data(), *square = squares.data();
    const auto sweep = [&](double* sums, auto f) {
      std::fill_n(sums, columns, 0.0);
      for_blocks(slabs, slab, first, first + n, {&x}, [&](int64_t r, int64_t rows, int64_t c, int64_t count) {
        const T* v = load<T>(slabs, x, slab, r, c, rows * count, buffer);
        for (int64_t i = 0; i < rows; ++i, v += count)
          for (int64_t j = 0; j < count; ++j) sums[c + j] += f(before(activations, v[j]), c + j);
      });
    };
    const double count = static_cast<double>(n);
    sweep(mean, [](double v, int64_t) { return v; });
    for (int64_t c = 0; c < columns; ++c) mean[c] /= count;
    sweep(square, [mean](double v, int64_t c) { return (v - mean[c]) * (v - mean[c]); });
    for (int64_t c = 0; c < columns; ++c) moments[c].join({count, mean[c], square[c]});
  }
}

/// y = (x - mean) * rstd * gamma + beta, the mean in two parts: subtracting it costs no accuracy even where it is large
/// beside the deviations.
template <class T>
struct Affine {
  T high, low, factor, term;

  Affine() = default;
  Affine(double mean, double rstd, double gamma, double beta)
      : high(static_cast<T>(mean)),
        low(static_cast<T>(mean - static_cast<double>(high))),
        factor(static_cast<T>(rstd * gamma)),
        term(static_cast<T>(beta)) {}
  T operator()(T x) const { return ((x - high) - low) * factor + term; }
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
      affine[static_cast<size_t>(n * slabs.channels + c)] = {own.first, own.second, entry(gamma, c, 1),
                                                             entry(beta, c, 0)};
    });
  });
  map_channels<T>(
      slabs, affine, [a](const Affine<T>& f, T v, T) { return a.after.value(f(a.before.value(v))); }, y, x, x);
}

/// The share that each rank has in the elements of a group, from the last rows of `all` (see OverRanks).
std::vector<double> shares_of_ranks(const View& all) {
  const int64_t rows = all.size[1], columns = all.size[2];
  std::vector<double> shares;
  for (int64_t rank = 0; rank < all.size[0]; ++rank)
    shares.push_back(all.as<const double>()[((rank + 1) * rows - 1) * columns]);
  const double total = std::max(std::accumulate(shares.begin(), shares.end(), 0.0), 1.0);
  for (double& share : shares) share /= total;
  return shares;
}

/// Sets (mean, rstd) of each group from those of all ranks (see OverRanks): the variances, which are rstd^-2 with eps
/// included, are joined about the common mean.
void join_ranks(const View& all, std::pair<double, double>* statistics) {
  const std::vector<double> shares = shares_of_ranks(all);
  const auto* given = all.as<const std::pair<double, double>>();
  const auto rows = static_cast<size_t>(all.size[1]);
  for (size_t group = 0; group + 1 < rows; ++group) {
    double mean = 0, variance = 0;
    for (size_t rank = 0; rank < shares.size(); ++rank) mean += shares[rank] * given[rank * rows + group].first;
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      const auto [own_mean, rstd] = given[rank * rows + group];
      if (shares[rank] > 0) variance += shares[rank] * (1 / (rstd * rstd) + (own_mean - mean) * (own_mean - mean));
    }
    statistics[group] = {mean, 1 / std::sqrt(variance)};
  }
}

template <class T, class Activations>
void forward(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
             double eps, const Activations& activations, const OverRanks* over_ranks) {
  const Slabs slabs(x);
  const RowOperand in(x, dtype_of<T>);
  std::vector<Moments> moments(slabs.sums());
  slabs.for_each([&](const Slab& slab) {
    Moments* into = moments.data() + slab.sums;
    if (slabs.channels_inner)
      add_columns<T>(into, slabs, in, slab, activations);
    else
      add_row<T>(*into, slabs, in, slab, activations);
  });
  // Mean and rstd of each group, then the number of elements in a group.
  std::vector<std::pair<double, double>> statistics(static_cast<size_t>(mean.numel() + 1));
  for_each_group(slabs, mean, [&](const Group& group) {
    Moments total;
    for (int64_t chunk = 0; chunk < slabs.chunks; ++chunk)
      group.for_each([&](int64_t n, int64_t c) {
        total.join(moments[static_cast<size_t>((n * slabs.chunks + chunk) * slabs.channels + c)]);
      });
    const double scale = 1 / std::sqrt(total.squares / std::max(total.count, 1.0) + eps);
    statistics[static_cast<size_t>(group.number)] = {total.mean, scale};
    if (group.number == 0) statistics.back() = {total.count, 0};
  });
  if (over_ranks)
    join_ranks((*over_ranks)(double_matrix(x, statistics.data(), mean.numel() + 1, 2)), statistics.data());
  for (int64_t number = 0; number < mean.numel(); ++number) {
    at<T>(mean, number) = static_cast<T>(statistics[static_cast<size_t>(number)].first);
    at<T>(rstd, number) = static_cast<T>(statistics[static_cast<size_t>(number)].second);
  }
  normalise<T>(slabs, y, x, mean, gamma, beta, activations,
               [&](const Group& group) { return statistics[static_cast<size_t>(group.number)]; });
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

/// Sets the means over each group from those of all ranks (see OverRanks).
void average_ranks(const View& all, GradientSums* means) {
  const std::vector<double> shares = shares_of_ranks(all);
  const auto* given = all.as<const GradientSums>();
  const auto rows = static_cast<size_t>(all.size[1]);
  for (size_t group = 0; group + 1 < rows; ++group) {
    means[group] = {};
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      const GradientSums& own = given[rank * rows + group];
      means[group].join({shares[rank] * own.g, shares[rank] * own.g_centred, shares[rank] * own.centred});
    }
  }
}

/// The normalisation of a channel as the forward pass computed it, (v - mean) * factor + term, and its gradient.
template <class T, class Activations>
struct ChannelNorm {
  T mean, factor, term;

  T centred(const Activations& a, T x) const { return a.before.value(x) - mean; }
  T gradient(const Activations& a, T dy, T centred) const { return a.after.gradient(dy, centred * factor + term); }
};

/// Adds a slab: to sums[0] if it belongs to one channel, norm[0], else to each channel's.
template <class T, class Activations>
void add_gradients(const Slabs& slabs, const Slab& slab, const RowOperand& dy, const RowOperand& x,
                   const ChannelNorm<T, Activations>* norm, const Activations& a, GradientSums* sums) {
  RowBuffer dy_buffer, x_buffer;
  for_blocks(slabs, slab, 0, slab.rows, {&dy, &x}, [&](int64_t r, int64_t rows, int64_t c, int64_t count) {
    const T* d = load<T>(slabs, dy, slab, r, c, rows * count, dy_buffer);
    const T* v = load<T>(slabs, x, slab, r, c, rows * count, x_buffer);
    if (slabs.channels_inner) {
      for (int64_t i = 0; i < rows; ++i, d += count, v += count)
        for (int64_t j = 0; j < count; ++j) {
          const auto centred = norm[c + j].centred(a, v[j]), g = norm[c + j].gradient(a, d[j], centred);
          sums[c + j].join({double{g}, double{g} * double{centred}, double{centred}});
        }
    } else {  // once from memory, three times from the cache
      const auto centred = [v, &a, m = *norm](int64_t i) { return m.centred(a, v[i]); };
      const auto g = [d, &a, m = *norm, centred](int64_t i) { return double{m.gradient(a, d[i], centred(i))}; };
      sums->join({sum_lanes(count, g), sum_lanes(count, [=](int64_t i) { return g(i) * double{centred(i)}; }),
                  sum_lanes(count, [=](int64_t i) { return double{centred(i)}; })});
    }
  });
}

template <class T, class Activations>
void backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean, const View& rstd,
              const View* gamma, const View* beta, const Activations& activations, const OverRanks* over_ranks) {
  using Norm = ChannelNorm<T, Activations>;
  const Slabs slabs(x);
  const RowOperand dy_rows(dy, dtype_of<T>), x_rows(x, dtype_of<T>);
  const int64_t lines = slabs.samples * slabs.channels;
  std::vector<Norm> norms(static_cast<size_t>(lines));
  const auto line = [&](int64_t n, int64_t c) { return static_cast<size_t>(n * slabs.channels + c); };
  for_each_group(slabs, mean, [&](const Group& group) {
    group.for_each([&](int64_t n, int64_t c) {
      norms[line(n, c)] = {at<T>(mean, group.number),
                           static_cast<T>(double{at<T>(rstd, group.number)} * entry(gamma, c, 1)),
                           static_cast<T>(entry(beta, c, 0))};
    });
  });
  std::vector<GradientSums> parts(slabs.sums()), sums(static_cast<size_t>(lines));
  slabs.for_each([&](const Slab& slab) {
    add_gradients<T>(slabs, slab, dy_rows, x_rows, norms.data() + slab.sample * slabs.channels + slab.channel,
                     activations, parts.data() + slab.sums);
  });

  // The means over each group of h, h * (v - mean) and v - mean, h = gamma * g; then the number of elements in a group.
  std::vector<GradientSums> means(static_cast<size_t>(mean.numel() + 1));
  for_each_group(slabs, mean, [&](const Group& group) {
    GradientSums& total = means[static_cast<size_t>(group.number)];
    const double count = static_cast<double>(std::max<int64_t>(1, group.lines() * slabs.length));
    group.for_each([&](int64_t n, int64_t c) {
      GradientSums& own = sums[line(n, c)];
      for (int64_t chunk = 0; chunk < slabs.chunks; ++chunk)
        own.join(parts[static_cast<size_t>((n * slabs.chunks + chunk) * slabs.channels + c)]);
      const double weight = entry(gamma, c, 1) / count;
      total.join({weight * own.g, weight * own.g_centred, own.centred / count});
    });
    if (group.number == 0) means.back().g = static_cast<double>(group.lines() * slabs.length);
  });
  if (over_ranks) average_ranks((*over_ranks)(double_matrix(x, means.data(), mean.numel() + 1, 3)), means.data());

  struct Coefficients {
    Norm norm;
    T low, slope, offset;
  };
  std::vector<Coefficients> coefficients(static_cast<size_t>(lines));
  for_each_group(slabs, mean, [&](const Group& group) {
    const double scale = double{at<T>(rstd, group.number)};
    // With n = (v - mean) * rstd: dv = rstd * (h - mean(h) - n * mean(h * n)).
    const GradientSums& of_group = means[static_cast<size_t>(group.number)];
    const double mean_h = of_group.g, low = of_group.centred, mean_hn = (of_group.g_centred - low * mean_h) * scale;
    group.for_each([&](int64_t n, int64_t c) {
      GradientSums& own = sums[line(n, c)];
      own.g_centred = (own.g_centred - low * own.g) * scale;
      coefficients[line(n, c)] = {norms[line(n, c)], static_cast<T>(low), static_cast<T>(-scale * scale * mean_hn),
                                  static_cast<T>(-scale * mean_h)};
    });
  });
  map_channels<T>(
      slabs, coefficients,
      [a = activations](const Coefficients& k, T d, T v) {
        const T centred = a.before.value(v) - k.norm.mean;
        const T g = a.after.gradient(d, centred * k.norm.factor + k.norm.term);
        return a.before.gradient(g * k.norm.factor + ((centred - k.low) * k.slope + k.offset), v);
      },
      out.dx, dy, x);

  for (int64_t c = 0; c < slabs.channels; ++c) {
    GradientSums total;
    for (int64_t n = 0; n < slabs.samples; ++n) total.join(sums[static_cast<size_t>(n * slabs.channels + c)]);
    set_entry(out.dbeta, c, total.g);
    set_entry(out.dgamma, c, total.g_centred);
  }
  if (out.sums) sum_channels(slabs, *out.sums, out.dx);
}

}  // namespace

void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps, const NormActivations& activations, const OverRanks* over_ranks) {
  dispatch(Floats(), x.dtype, "group_norm", "CPU", [&]<class T>() {
    with_activations<compute_t<T>>(
        activations, [&](const auto& a) { forward<compute_t<T>>(y, mean, rstd, x, gamma, beta, eps, a, over_ranks); });
  });
}

void normalize(const View& y, const View& x, const View& mean, const View& rstd, const View* gamma, const View* beta) {
  dispatch(Floats(), x.dtype, "normalize", "CPU", [&]<class T>() {
    normalise<compute_t<T>>(Slabs(x), y, x, mean, gamma, beta, NoActivations({}), [&](const Group& group) {
      const auto given = [&](const View& v) { return static_cast<double>(at<compute_t<T>>(v, group.number)); };
      return std::pair(given(mean), given(rstd));
    });
  });
}

void group_norm_backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                         const View& rstd, const View* gamma, const View* beta, const NormActivations& activations,
                         const OverRanks* over_ranks) {
  dispatch(Floats(), x.dtype, "group_norm_backward", "CPU", [&]<class T>() {
    with_activations<compute_t<T>>(activations, [&](const auto& a) {
      backward<compute_t<T>>(out, dy, x, mean, rstd, gamma, beta, a, over_ranks);
    });
  });
}

void track_statistics(const View* running_mean, const View* running_var, const View& mean, const View& rstd, double eps,
                      double count, const View* counts, double momentum) {
  if (counts) {
    count = 0;
    for (int64_t rank = 0; rank < counts->size[0]; ++rank)
      count += counts->as<const double>()[rank * counts->stride[0]];
  }
  if (count <= 1) return;  // no unbiased variance
  const double unbiased = count / (count - 1);
  const auto move = [&](const View* running, int64_t c, double value) {
    const double own = entry(running, c, 0);
    set_entry(running, c, own + momentum * (value - own));
  };
  dispatch(Types<float, double>(), mean.dtype, "track_statistics", "CPU", [&]<class T>() {
    for (int64_t c = 0; c < mean.size[1]; ++c) {
      const double scale = double{at<T>(rstd, c)};
      move(running_mean, c, double{at<T>(mean, c)});
      move(running_var, c, std::max(1 / (scale * scale) - eps, 0.0) * unbiased);
    }
  });
}

}  // namespace voxgrad::cpu
