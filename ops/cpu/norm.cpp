// Group normalization, forward and backward. Both compute sums per channel, then coefficients per channel, and then all
// elements in an elementwise pass.
//
// Statistics are computed per block that fits in the first-level cache: first the mean, then the squared deviations.
// The results of blocks and channels are joined by the update of Chan, Golub and LeVeque ("Updating formulae and a
// pairwise algorithm for computing sample variances", 1979). This needs one pass over memory and avoids the difference
// of large squares. Elements are converted when they are loaded and stored. Sums are in double, coefficients in
// compute_t.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "ops/cpu/slabs.h"
#include "ops/detail/norm_activations.h"

namespace voxgrad::cpu {
namespace {

// Elements of a block that fits in the first-level cache.
constexpr int64_t kCachedElements = 2048;

/// The statistics of a set of elements.
struct Moments {
  double count = 0;
  double mean = 0;
  double squares = 0;  // sum of squared deviations from the mean

  void join(const Moments& other) {
    if (other.count == 0) return;
    const double delta = other.mean - mean, total = count + other.count;
    mean += delta * (other.count / total);
    squares += other.squares + delta * delta * (count * other.count / total);
    count = total;
  }
};

/// Returns before(v) in double, for the statistics.
template <class T, class Activations>
double before(const Activations& activations, T v) {
  return static_cast<double>(activations.before.value(v));
}

/// Adds a slab of one channel to the statistics of the channel.
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

/// Adds a slab of all channels to the statistics of each channel.
template <class T, class Activations>
void add_columns(Moments* moments, const Slabs& slabs, const RowOperand& x, const Slab& slab,
                 const Activations& activations) {
  const int64_t columns = slab.columns;
  std::vector<double> means(static_cast<size_t>(columns)), squares(means.size());
  RowBuffer buffer;
  const int64_t block_rows = std::max<int64_t>(1, kCachedElements / columns);
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

/// y = (x - mean) * rstd * gamma + beta. The mean is stored as the sum of two values, so that the subtraction is
/// accurate even if the mean is large compared with the deviations.
template <class T>
struct Affine {
  T high;  // the rounded mean
  T low;   // the rounding error of `high`
  T factor;
  T term;

  Affine() = default;
  Affine(double mean, double rstd, double gamma, double beta)
      : high(static_cast<T>(mean)),
        low(static_cast<T>(mean - static_cast<double>(high))),
        factor(static_cast<T>(rstd * gamma)),
        term(static_cast<T>(beta)) {}
  T operator()(T x) const { return ((x - high) - low) * factor + term; }
};

/// Computes y = after((before(x) - mean) * rstd * gamma + beta) with {mean, rstd} = statistics(group). `groups` has the
/// shape of the statistics.
template <class T, class Activations, class F>
void apply_norm(const Slabs& slabs, const View& y, const View& x, const View& groups, const View* gamma,
                const View* beta, const Activations& a, F&& statistics) {
  std::vector<Affine<T>> affine(static_cast<size_t>(slabs.samples * slabs.channels));
  for_each_group(slabs, groups, [&](const Group& group) {
    const std::pair<double, double> mean_rstd = statistics(group);
    group.for_each([&](int64_t n, int64_t c) {
      affine[static_cast<size_t>(n * slabs.channels + c)] = {mean_rstd.first, mean_rstd.second, entry(gamma, c, 1),
                                                             entry(beta, c, 0)};
    });
  });
  map_channels<T>(
      slabs, affine, [a](const Affine<T>& f, T v, T) { return a.after.value(f(a.before.value(v))); }, y, x, x);
}

/// Returns the fraction of the elements of a group that each rank has, from the last rows of `all` (see
/// GatherStatistics).
std::vector<double> shares_of_ranks(const View& all) {
  const int64_t rows = all.size[1], columns = all.size[2];
  std::vector<double> shares;
  for (int64_t rank = 0; rank < all.size[0]; ++rank)
    shares.push_back(all.as<const double>()[((rank + 1) * rows - 1) * columns]);
  const double total = std::max(std::accumulate(shares.begin(), shares.end(), 0.0), 1.0);
  for (double& share : shares) share /= total;
  return shares;
}

/// Computes (mean, rstd) of each group from the statistics of all ranks (see GatherStatistics). Joins the variances,
/// which are rstd^-2 and include eps, around the common mean.
void join_ranks(const View& all, std::pair<double, double>* statistics) {
  const std::vector<double> shares = shares_of_ranks(all);
  const auto* of_ranks = all.as<const std::pair<double, double>>();
  const auto rows = static_cast<size_t>(all.size[1]);
  for (size_t group = 0; group + 1 < rows; ++group) {
    double mean = 0, variance = 0;
    for (size_t rank = 0; rank < shares.size(); ++rank) mean += shares[rank] * of_ranks[rank * rows + group].first;
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      const auto [rank_mean, rstd] = of_ranks[rank * rows + group];
      if (shares[rank] > 0) variance += shares[rank] * (1 / (rstd * rstd) + (rank_mean - mean) * (rank_mean - mean));
    }
    statistics[group] = {mean, 1 / std::sqrt(variance)};
  }
}

template <class T, class Activations>
void forward(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
             double eps, const Activations& activations, const GatherStatistics* over_ranks) {
  const Slabs slabs(x);
  const RowOperand in(x, dtype_of<T>);
  std::vector<Moments> moments(slabs.sums());
  slabs.for_each([&](const Slab& slab) {
    Moments* const slab_moments = moments.data() + slab.sums;
    if (slabs.channels_inner)
      add_columns<T>(slab_moments, slabs, in, slab, activations);
    else
      add_row<T>(*slab_moments, slabs, in, slab, activations);
  });
  // The mean and rstd of each group. The last entry is the number of elements in a group.
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
  apply_norm<T>(slabs, y, x, mean, gamma, beta, activations,
                [&](const Group& group) { return statistics[static_cast<size_t>(group.number)]; });
}

/// Sums over elements of a channel, where v = before(x), and g is the gradient of the normalized value.
struct GradientSums {
  double g = 0;           // sum of g
  double g_centered = 0;  // sum of g * (v - mean)
  double centered = 0;    // sum of v - mean, which corrects the rounding of the stored mean

  void join(const GradientSums& other) {
    g += other.g;
    g_centered += other.g_centered;
    centered += other.centered;
  }
};

/// Computes the means over each group from the means of all ranks (see GatherStatistics).
void average_ranks(const View& all, GradientSums* means) {
  const std::vector<double> shares = shares_of_ranks(all);
  const auto* of_ranks = all.as<const GradientSums>();
  const auto rows = static_cast<size_t>(all.size[1]);
  for (size_t group = 0; group + 1 < rows; ++group) {
    means[group] = {};
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      const GradientSums& mean = of_ranks[rank * rows + group];
      means[group].join({shares[rank] * mean.g, shares[rank] * mean.g_centered, shares[rank] * mean.centered});
    }
  }
}

/// The normalization of a channel as the forward pass computed it, (v - mean) * factor + term, and its gradient.
template <class T, class Activations>
struct ChannelNorm {
  T mean;
  T factor;
  T term;

  T centered(const Activations& a, T x) const { return a.before.value(x) - mean; }
  T gradient(const Activations& a, T dy, T centered) const { return a.after.gradient(dy, centered * factor + term); }
};

/// Adds the sums of a slab to `sums`, which has one entry for each channel of the slab, like `norm`.
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
          const auto centered = norm[c + j].centered(a, v[j]), g = norm[c + j].gradient(a, d[j], centered);
          sums[c + j].join({double{g}, double{g} * double{centered}, double{centered}});
        }
    } else {  // three sweeps; the second and third read the block from the cache
      const auto centered = [v, &a, m = *norm](int64_t i) { return m.centered(a, v[i]); };
      const auto g = [d, &a, m = *norm, centered](int64_t i) { return double{m.gradient(a, d[i], centered(i))}; };
      sums->join({sum_lanes(count, g), sum_lanes(count, [=](int64_t i) { return g(i) * double{centered(i)}; }),
                  sum_lanes(count, [=](int64_t i) { return double{centered(i)}; })});
    }
  });
}

/// The gradients of a normalization. A line is a channel of a sample.
template <class T, class Activations>
class Backward {
 public:
  Backward(const View& dy, const View& x, const View& mean, const View& rstd, const View* gamma, const View* beta,
           const Activations& activations)
      : dy_(dy),
        x_(x),
        mean_(mean),
        rstd_(rstd),
        gamma_(gamma),
        activations_(activations),
        slabs_(x),
        norms_(static_cast<size_t>(slabs_.samples * slabs_.channels)),
        sums_(norms_.size()) {
    for_each_group(slabs_, mean, [&](const Group& group) {
      group.for_each([&](int64_t n, int64_t c) {
        norms_[line(n, c)] = {at<T>(mean, group.number),
                              static_cast<T>(double{at<T>(rstd, group.number)} * entry(gamma, c, 1)),
                              static_cast<T>(entry(beta, c, 0))};
      });
    });
  }

  void run(const GroupNormGradients& out, const GatherStatistics* over_ranks) {
    std::vector<GradientSums> means = sum_gradients();
    if (over_ranks) average_ranks((*over_ranks)(double_matrix(x_, means.data(), mean_.numel() + 1, 3)), means.data());
    compute_dx(out.dx, means);
    for (int64_t c = 0; c < slabs_.channels; ++c) {
      GradientSums total;
      for (int64_t n = 0; n < slabs_.samples; ++n) total.join(sums_[line(n, c)]);
      set_entry(out.dbeta, c, total.g);
      set_entry(out.dgamma, c, total.g_centered);
    }
    if (out.sums) sum_channels(slabs_, *out.sums, out.dx);
  }

 private:
  size_t line(int64_t n, int64_t c) const { return static_cast<size_t>(n * slabs_.channels + c); }

  /// Computes sums_ and returns the means over each group of h, h * (v - mean) and v - mean, where h = gamma * g. The
  /// last entry is the number of elements in a group.
  std::vector<GradientSums> sum_gradients() {
    const RowOperand dy(dy_, dtype_of<T>), x(x_, dtype_of<T>);
    std::vector<GradientSums> parts(slabs_.sums());
    slabs_.for_each([&](const Slab& slab) {
      add_gradients<T>(slabs_, slab, dy, x, norms_.data() + line(slab.sample, slab.channel), activations_,
                       parts.data() + slab.sums);
    });
    std::vector<GradientSums> means(static_cast<size_t>(mean_.numel() + 1));
    for_each_group(slabs_, mean_, [&](const Group& group) {
      GradientSums& mean = means[static_cast<size_t>(group.number)];
      const double count = static_cast<double>(std::max<int64_t>(1, group.lines() * slabs_.length));
      group.for_each([&](int64_t n, int64_t c) {
        GradientSums& sums = sums_[line(n, c)];
        for (int64_t chunk = 0; chunk < slabs_.chunks; ++chunk)
          sums.join(parts[static_cast<size_t>((n * slabs_.chunks + chunk) * slabs_.channels + c)]);
        const double weight = entry(gamma_, c, 1) / count;
        mean.join({weight * sums.g, weight * sums.g_centered, sums.centered / count});
      });
      if (group.number == 0) means.back().g = static_cast<double>(group.lines() * slabs_.length);
    });
    return means;
  }

  /// Computes dx. Replaces g_centered in sums_ by the gradient of gamma: the sum of g times the normalized value.
  void compute_dx(const View& dx, const std::vector<GradientSums>& means) {
    struct Coefficients {
      ChannelNorm<T, Activations> norm;
      T low;  // mean of v minus the stored mean
      T slope;
      T offset;
    };
    std::vector<Coefficients> coefficients(norms_.size());
    for_each_group(slabs_, mean_, [&](const Group& group) {
      // With n = (v - mean) * rstd: dv = rstd * (h - mean(h) - n * mean(h * n)).
      const double scale = double{at<T>(rstd_, group.number)};
      const GradientSums& mean = means[static_cast<size_t>(group.number)];
      const double mean_h = mean.g, low = mean.centered, mean_hn = (mean.g_centered - low * mean_h) * scale;
      group.for_each([&](int64_t n, int64_t c) {
        GradientSums& sums = sums_[line(n, c)];
        sums.g_centered = (sums.g_centered - low * sums.g) * scale;
        coefficients[line(n, c)] = {norms_[line(n, c)], static_cast<T>(low), static_cast<T>(-scale * scale * mean_hn),
                                    static_cast<T>(-scale * mean_h)};
      });
    });
    map_channels<T>(
        slabs_, coefficients,
        [a = activations_](const Coefficients& k, T d, T v) {
          const T centered = a.before.value(v) - k.norm.mean;
          const T g = a.after.gradient(d, centered * k.norm.factor + k.norm.term);
          return a.before.gradient(g * k.norm.factor + ((centered - k.low) * k.slope + k.offset), v);
        },
        dx, dy_, x_);
  }

  const View& dy_;
  const View& x_;
  const View& mean_;
  const View& rstd_;
  const View* gamma_;
  const Activations& activations_;
  Slabs slabs_;
  std::vector<ChannelNorm<T, Activations>> norms_;  // per line
  std::vector<GradientSums> sums_;                  // per line
};

}  // namespace

void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps, const NormActivations& activations, const GatherStatistics* over_ranks) {
  dispatch(Floats(), x.dtype, "group_norm", "CPU", [&]<class T>() {
    with_activations<compute_t<T>>(
        activations, [&](const auto& a) { forward<compute_t<T>>(y, mean, rstd, x, gamma, beta, eps, a, over_ranks); });
  });
}

void normalize(const View& y, const View& x, const View& mean, const View& rstd, const View* gamma, const View* beta) {
  dispatch(Floats(), x.dtype, "normalize", "CPU", [&]<class T>() {
    apply_norm<compute_t<T>>(Slabs(x), y, x, mean, gamma, beta, NoActivations({}), [&](const Group& group) {
      const auto value = [&](const View& v) { return static_cast<double>(at<compute_t<T>>(v, group.number)); };
      return std::pair(value(mean), value(rstd));
    });
  });
}

void group_norm_backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                         const View& rstd, const View* gamma, const View* beta, const NormActivations& activations,
                         const GatherStatistics* over_ranks) {
  dispatch(Floats(), x.dtype, "group_norm_backward", "CPU", [&]<class T>() {
    with_activations<compute_t<T>>(activations, [&](const auto& a) {
      using Activations = std::remove_cvref_t<decltype(a)>;
      Backward<compute_t<T>, Activations>(dy, x, mean, rstd, gamma, beta, a).run(out, over_ranks);
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
  if (count <= 1) return;  // the unbiased variance is undefined
  const double unbiased = count / (count - 1);
  const auto update = [&](const View* running, int64_t c, double value) {
    const double old = entry(running, c, 0);
    set_entry(running, c, old + momentum * (value - old));
  };
  dispatch(Types<float, double>(), mean.dtype, "track_statistics", "CPU", [&]<class T>() {
    for (int64_t c = 0; c < mean.size[1]; ++c) {
      const double scale = double{at<T>(rstd, c)};
      update(running_mean, c, double{at<T>(mean, c)});
      update(running_var, c, std::max(1 / (scale * scale) - eps, 0.0) * unbiased);
    }
  });
}

}  // namespace voxgrad::cpu
