// Sums over the voxels of every class, of which losses are made, and their gradient: one pass over the logits each.
// Logits pass through the cache a block of positions at a time, all classes of it; sums are in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/eigen.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

/// The number of the class at a voxel, or -1 if it is passed over.
int64_t class_at(const View& target, int64_t n, int64_t position, int64_t ignored) {
  const int64_t i = n * target.stride[0] + position * target.stride[1];
  const int64_t number = target.dtype == i64   ? target.as<const int64_t>()[i]
                         : target.dtype == i32 ? target.as<const int32_t>()[i]
                                               : target.as<const uint8_t>()[i];
  return number == ignored ? -1 : number;
}

/// Up to kBlock voxels of one sample: classes, probabilities and logits by class, then voxel.
template <class T>
struct Voxels {
  using Wide = compute_t<T>;
  const View &x, &target;
  const ClassSums& options;
  int64_t classes, count = 0;
  std::vector<Wide> p, shifted;         // shifted: logits less the largest of the voxel
  Wide top[kBlock], log_total[kBlock];  // -log p = log_total - shifted
  int64_t number[kBlock];

  Voxels(const View& logits, const View& map, const ClassSums& given)
      : x(logits),
        target(map),
        options(given),
        classes(x.size[1]),
        p(static_cast<size_t>(classes * kBlock)),
        shifted(p.size()) {}
  Wide* row(std::vector<Wide>& values, int64_t c) { return values.data() + c * kBlock; }

  void load(int64_t n, int64_t first, int64_t voxels) {
    count = voxels;
    for (int64_t j = 0; j < count; ++j) number[j] = class_at(target, n, first + j, options.ignore_index);
    const T* from = x.as<const T>() + n * x.stride[0] + first * x.stride[2];
    std::vector<Wide>& into = options.softmax ? shifted : p;
    if (x.stride[1] == 1) {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t c = 0; c < classes; ++c)
          into[static_cast<size_t>(c * kBlock + j)] = Wide(from[j * x.stride[2] + c]);
    } else {
      for (int64_t c = 0; c < classes; ++c)
        for (int64_t j = 0; j < count; ++j) row(into, c)[j] = Wide(from[c * x.stride[1] + j * x.stride[2]]);
    }
    std::fill_n(log_total, kBlock, Wide(0));
    if (options.softmax) take_softmax();
  }

  void take_softmax() {
    double total[kBlock] = {};
    std::fill_n(top, kBlock, -std::numeric_limits<Wide>::infinity());
    for (int64_t c = 0; c < classes; ++c)
      for (int64_t j = 0; j < count; ++j) top[j] = std::max(top[j], row(shifted, c)[j]);
    for (int64_t c = 0; c < classes; ++c) {
      Wide *v = row(shifted, c), *power = row(p, c);
      for (int64_t j = 0; j < count; ++j) v[j] -= top[j];
      map_blocks<Wide>([](const Block<Wide>& a) -> Block<Wide> { return exp_block<Wide>(a); }, count, power,
                       static_cast<const Wide*>(v));
      for (int64_t j = 0; j < count; ++j) total[j] += static_cast<double>(power[j]);
    }
    for (int64_t j = 0; j < count; ++j) log_total[j] = static_cast<Wide>(std::log(total[j]));
    for (int64_t c = 0; c < classes; ++c)
      for (int64_t j = 0; j < count; ++j)
        row(p, c)[j] = static_cast<Wide>(static_cast<double>(row(p, c)[j]) / total[j]);
  }

  /// Adds to sums[class][kClassSums].
  void add_to(double* sums) {
    for (int64_t c = 0; c < classes; ++c) {
      const Wide *share = row(p, c), *v = row(shifted, c);
      double of_p = 0, of_logs = 0;
      for (int64_t j = 0; j < count; ++j) {
        if (number[j] < 0) continue;
        of_p += static_cast<double>(options.squared ? share[j] * share[j] : share[j]);
        of_logs += static_cast<double>(log_total[j] - v[j]);
      }
      sums[c * kClassSums] += of_p;
      sums[c * kClassSums + 4] += of_logs;
    }
    for (int64_t j = 0; j < count; ++j) {
      if (number[j] < 0) continue;
      double* own = sums + number[j] * kClassSums;
      own[1] += static_cast<double>(row(p, number[j])[j]);
      own[2] += 1;
      own[3] += static_cast<double>(log_total[j] - row(shifted, number[j])[j]);
    }
  }

  /// The gradients of the voxels' logits from those of the sums, in place of the probabilities.
  void differentiate(const Wide* grad) {
    Wide common[kBlock] = {};
    const auto slope = [&](int64_t c, Wide share) {
      return grad[c * kClassSums] * (options.squared ? Wide(2) * share : Wide(1));
    };
    for (int64_t c = 0; c < classes && options.softmax; ++c)
      for (int64_t j = 0; j < count; ++j) {
        const Wide share = row(p, c)[j];
        common[j] += grad[c * kClassSums + 4] - share * slope(c, share);
      }
    for (int64_t j = 0; j < count && options.softmax; ++j)
      if (number[j] >= 0)
        common[j] += grad[number[j] * kClassSums + 3] - row(p, number[j])[j] * grad[number[j] * kClassSums + 1];
    for (int64_t c = 0; c < classes; ++c) {
      const Wide* own = grad + c * kClassSums;
      for (int64_t j = 0; j < count; ++j) {
        Wide& value = row(p, c)[j];
        const bool here = number[j] == c;
        Wide d = slope(c, value) + (here ? own[1] : Wide(0));
        if (options.softmax) d = value * (d + common[j]) - own[4] - (here ? own[3] : Wide(0));
        value = number[j] < 0 ? Wide(0) : d;
      }
    }
  }

  void store(const View& dx, int64_t n, int64_t first) {
    T* into = dx.as<T>() + n * dx.stride[0] + first * dx.stride[2];
    for (int64_t j = 0; j < count; ++j)
      for (int64_t c = 0; c < classes; ++c) into[j * dx.stride[2] + c * dx.stride[1]] = convert<T>(row(p, c)[j]);
  }
};

/// Parts into which the voxels of a sample are cut.
constexpr int64_t kPart = 64 * kBlock;
int64_t parts_of(const View& x) { return (x.size[2] + kPart - 1) / kPart; }

/// Calls f(voxels, part, sample, first position) for all blocks, in parallel over the parts of all samples.
template <class T, class F>
void for_each_block(const View& x, const View& target, const ClassSums& options, F&& f) {
  const int64_t parts = parts_of(x), work = std::min(kPart, x.size[2]) * x.size[1] * 8;
  parallel_for(x.size[0] * parts, grain_of(work), [&](int64_t begin, int64_t end) {
    Voxels<T> voxels(x, target, options);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / parts, last = std::min((i % parts + 1) * kPart, x.size[2]);
      for (int64_t first = i % parts * kPart; first < last; first += kBlock) {
        voxels.load(n, first, std::min<int64_t>(kBlock, last - first));
        f(voxels, i, n, first);
      }
    }
  });
}

}  // namespace

void class_sums(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options) {
  const int64_t own = x.size[1] * kClassSums, parts = parts_of(x), sets = sums.size[0];
  std::vector<double> partial(static_cast<size_t>(x.size[0] * parts * own));
  dispatch(Floats(), x.dtype, op, "CPU", [&]<class T>() {
    for_each_block<T>(x, target, options, [&](Voxels<T>& voxels, int64_t part, int64_t, int64_t) {
      voxels.add_to(partial.data() + part * own);
    });
  });
  auto* out = sums.as<double>();
  std::fill_n(out, sets * own, 0.0);
  for (int64_t n = 0; n < x.size[0]; ++n)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t k = 0; k < own; ++k)
        out[(sets == 1 ? 0 : n * own) + k] += partial[static_cast<size_t>((n * parts + part) * own + k)];
}

void class_sums_backward(const View& dx, const View& grad, const View& x, const View& target,
                         const ClassSums& options) {
  dispatch(Floats(), x.dtype, "class_sums_backward", "CPU", [&]<class T>() {
    const auto* gradients = grad.as<const compute_t<T>>();
    const int64_t step = grad.size[0] == 1 ? 0 : x.size[1] * kClassSums;
    for_each_block<T>(x, target, options, [&](Voxels<T>& voxels, int64_t, int64_t n, int64_t first) {
      voxels.differentiate(gradients + n * step);
      voxels.store(dx, n, first);
    });
  });
}

}  // namespace voxgrad::cpu
