// Passes over the channels of (N, C, L), for norms and what else has a number for each channel: cut into slabs by the
// shape alone, so that sums do not depend on the number of threads. Private to ops/cpu/.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "core/detail/divide.h"
#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {

/// Elements that one thread takes at a time, and elements that stay in the first-level cache.
inline constexpr int64_t kSlab = 65536;
inline constexpr int64_t kBlock = 2048;

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
    chunks = divide_up(length, positions);
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

  /// Where row r of a slab begins.
  int64_t row(const View& v, const Slab& slab, int64_t r) const {
    return slab.sample * v.stride[0] + slab.channel * v.stride[1] + slab.position * v.stride[2] +
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

/// Entry c of a vector, which may be missing.
inline double entry(const View* v, int64_t c, double otherwise) {
  if (v)
    dispatch(Floats(), v->dtype, "norm", "CPU",
             [&]<class T>() { otherwise = convert<double>(v->as<T>()[c * v->stride[0]]); });
  return otherwise;
}
inline void set_entry(const View* v, int64_t c, double value) {
  if (v)
    dispatch(Floats(), v->dtype, "norm", "CPU", [&]<class T>() { v->as<T>()[c * v->stride[0]] = convert<T>(value); });
}

/// `count` elements of a slab from column `first` of row r on, as T; they may be those of several rows, dense ones.
template <class T>
const T* load(const Slabs& slabs, const RowOperand& in, const Slab& slab, int64_t r, int64_t first, int64_t count,
              RowBuffer& buffer) {
  const int64_t step = slabs.step(in.view);
  return static_cast<const T*>(in.load(slabs.row(in.view, slab, r) + first * step, step, count, buffer));
}

/// Calls f(r, rows, c, columns) for blocks that cover the rows [begin, end) of a slab and that load() takes at once:
/// whole rows where they are dense in all operands, else parts of one.
template <class F>
void for_blocks(const Slabs& slabs, const Slab& slab, int64_t begin, int64_t end,
                std::initializer_list<const RowOperand*> operands, F&& f) {
  const int64_t columns = std::min(kRowPiece, slab.columns);
  const bool dense = std::all_of(operands.begin(), operands.end(), [&](const RowOperand* operand) {
    return slabs.step(operand->view) == 1 && operand->view.stride[2] == columns;
  });
  const int64_t rows = dense && slabs.channels_inner ? kRowPiece / columns : 1;
  for (int64_t r = begin; r < end; r += rows)
    for (int64_t c = 0; c < slab.columns; c += columns)
      f(r, std::min(rows, end - r), c, std::min(columns, slab.columns - c));
}

/// out = f(coefficients of the channel, first, second) everywhere, computed in T; coefficients by sample and channel.
template <class T, class K, class F>
void map_channels(const Slabs& slabs, const std::vector<K>& coefficients, F&& f, const View& result, const View& first,
                  const View& second) {
  const RowOperand out(result, dtype_of<T>), in[2]{{first, dtype_of<T>}, {second, dtype_of<T>}};
  const int64_t step = slabs.step(result);
  slabs.for_each([&](const Slab& slab) {
    const K* k = coefficients.data() + slab.sample * slabs.channels + slab.channel;
    RowBuffer buffers[3];
    for_blocks(slabs, slab, 0, slab.rows, {&out, &in[0], &in[1]},
               [&](int64_t r, int64_t rows, int64_t c, int64_t count) {
                 const int64_t at = slabs.row(result, slab, r) + c * step;
                 const T* x = load<T>(slabs, in[0], slab, r, c, rows * count, buffers[1]);
                 const T* v = &first == &second ? x : load<T>(slabs, in[1], slab, r, c, rows * count, buffers[2]);
                 T* y = static_cast<T*>(out.target(at, step, buffers[0]));
                 if (slabs.channels_inner) {
                   const K* own = k + c;
                   for (int64_t i = 0; i < rows * count; i += count) {
                     VG_INDEPENDENT
                     for (int64_t j = 0; j < count; ++j) y[i + j] = f(own[j], x[i + j], v[i + j]);
                   }
                 } else {
                   const K same = *k;
                   VG_INDEPENDENT
                   for (int64_t j = 0; j < count; ++j) y[j] = f(same, x[j], v[j]);
                 }
                 out.store(at, step, rows * count, buffers[0]);
               });
  });
}

/// sums (C) of f(first, second), in double.
template <class T, class F>
void sum_channels(const Slabs& slabs, const View& sums, F&& f, const View& first, const View& second) {
  const RowOperand in[2]{{first, dtype_of<T>}, {second, dtype_of<T>}};
  std::vector<double> parts(slabs.sums());
  slabs.for_each([&](const Slab& slab) {
    double* into = parts.data() + slab.sums;
    RowBuffer buffers[2];
    if (!slabs.channels_inner) {
      *into += fold_pieces(slab.columns, kRowPiece, 0.0, std::plus<double>(), [&](int64_t c, int64_t count) {
        const T* x = load<T>(slabs, in[0], slab, 0, c, count, buffers[0]);
        const T* v = &first == &second ? x : load<T>(slabs, in[1], slab, 0, c, count, buffers[1]);
        return [&f, x, v](int64_t j) { return f(static_cast<double>(x[j]), static_cast<double>(v[j])); };
      });
      return;
    }
    for_blocks(slabs, slab, 0, slab.rows, {&in[0], &in[1]}, [&](int64_t r, int64_t rows, int64_t c, int64_t count) {
      const T* x = load<T>(slabs, in[0], slab, r, c, rows * count, buffers[0]);
      const T* v = &first == &second ? x : load<T>(slabs, in[1], slab, r, c, rows * count, buffers[1]);
      for (int64_t i = 0; i < rows; ++i, x += count, v += count)
        for (int64_t j = 0; j < count; ++j) into[c + j] += f(static_cast<double>(x[j]), static_cast<double>(v[j]));
    });
  });
  for (int64_t c = 0; c < slabs.channels; ++c) {
    double total = 0;
    for (int64_t row = 0; row < slabs.samples * slabs.chunks; ++row)
      total += parts[static_cast<size_t>(row * slabs.channels + c)];
    set_entry(&sums, c, total);
  }
}

/// sums (C) of x.
inline void sum_channels(const Slabs& slabs, const View& sums, const View& x) {
  dispatch(Floats(), x.dtype, "sum_channels", "CPU", [&]<class T>() {
    sum_channels<compute_t<T>>(
        slabs, sums, [](double v, double) { return v; }, x, x);
  });
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

}  // namespace voxgrad::cpu
