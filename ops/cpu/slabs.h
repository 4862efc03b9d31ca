// Loops over the channels of (N, C, L) views, for normalization and other operators with coefficients or sums per
// channel. The views are divided into parts (struct Slab). The division depends only on the shape and strides, so that
// sums do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "ops/cpu/loops.h"

namespace voxgrad::cpu {

/// Largest number of elements per slab. If channels are innermost, a slab has at least one position with all channels.
inline constexpr int64_t kSlabElements = 65536;

/// The part of a sample that one thread processes at a time. If channels are innermost, a slab has a row for each of
/// its positions, with all channels as columns. Otherwise it has a single row, with positions of one channel as
/// columns.
struct Slab {
  int64_t sample;
  int64_t channel;   // first channel
  int64_t position;  // first position along L
  int64_t rows;
  int64_t columns;
  int64_t chunk;  // index of the slab along L
};

/// The division of (N, C, L) into slabs. It depends on the shape and strides of x and is used for all views of a call.
struct Slabs {
  int64_t samples;
  int64_t channels;
  int64_t length;
  int64_t positions;  // positions per slab
  int64_t chunks;     // slabs along L
  bool channels_inner;

  explicit Slabs(const View& x)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        channels_inner(channels > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2])) {
    positions = channels_inner ? std::max<int64_t>(1, kSlabElements / channels) : kSlabElements;
    chunks = divide_up(length, positions);
  }

  /// Calls f(slab) for all slabs, in parallel.
  template <class F>
  void for_each(F&& f) const {
    const int64_t lines = channels_inner ? 1 : channels;
    parallel_for(
        samples * lines * chunks, grain_of(std::min(positions, length) * channels / std::max<int64_t>(1, lines)),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t chunk = i % chunks, channel = i / chunks % lines, sample = i / chunks / lines;
            const int64_t first = chunk * positions, count = std::min(positions, length - first);
            f(Slab{sample, channel, first, channels_inner ? count : 1, channels_inner ? channels : count, chunk});
          }
        });
  }
  /// Returns the number of lines. A line is a channel of a sample.
  size_t lines() const { return static_cast<size_t>(samples * channels); }
  size_t line(int64_t sample, int64_t channel) const { return static_cast<size_t>(sample * channels + channel); }

  /// Returns the offset of row r of a slab in view v.
  int64_t row(const View& v, const Slab& slab, int64_t r) const {
    return slab.sample * v.stride[0] + slab.channel * v.stride[1] + slab.position * v.stride[2] +
           (channels_inner ? r * v.stride[2] : 0);
  }
  /// Returns the stride of the columns in view v.
  int64_t step(const View& v) const { return v.stride[channels_inner ? 1 : 2]; }
};

/// A group of a normalization: a range of channels in one sample or in all samples.
struct Group {
  int64_t number;
  int64_t sample;  // first sample
  int64_t samples;
  int64_t channel;  // first channel
  int64_t channels;

  /// Returns the number of lines of the group: its channels times its samples.
  int64_t lines() const { return samples * channels; }
  /// Calls f(n, c) for all channels c and samples n.
  template <class F>
  void for_each(F&& f) const {
    for (int64_t n = sample; n < sample + samples; ++n)
      for (int64_t c = channel; c < channel + channels; ++c) f(n, c);
  }
};

/// Returns element c of the vector `v`, or `fallback` if `v` is null.
inline double entry(const View* v, int64_t c, double fallback) {
  double value = fallback;
  if (v)
    dispatch(Floats(), v->dtype, "norm", "CPU",
             [&]<class T>() { value = convert<double>(v->as<T>()[c * v->stride[0]]); });
  return value;
}
/// Sets element c of the vector `v`. Does nothing if `v` is null.
inline void set_entry(const View* v, int64_t c, double value) {
  if (v)
    dispatch(Floats(), v->dtype, "norm", "CPU", [&]<class T>() { v->as<T>()[c * v->stride[0]] = convert<T>(value); });
}

/// Returns `count` elements of a slab as T, from column `first` of row r on. The elements may span several rows if the
/// rows are contiguous.
template <class T>
const T* load(const Slabs& slabs, const RowOperand& in, const Slab& slab, int64_t r, int64_t first, int64_t count,
              RowBuffer& buffer) {
  const int64_t step = slabs.step(in.view);
  return static_cast<const T*>(in.load(slabs.row(in.view, slab, r) + first * step, step, count, buffer));
}

/// Calls f(first row, rows, first column, columns) for blocks that cover the rows [begin, end) of a slab. A block has
/// at most kRowPiece elements: several rows if rows are contiguous in all operands, otherwise a part of one row.
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

/// Computes result = f(coefficients of the channel, first, second) for all elements, in type T. `coefficients` has one
/// entry per sample and channel.
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
                   const K* channel = k + c;
                   for (int64_t i = 0; i < rows * count; i += count) {
                     VG_INDEPENDENT
                     for (int64_t j = 0; j < count; ++j) y[i + j] = f(channel[j], x[i + j], v[i + j]);
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

/// Returns kSums sums for each line, computed in double. f(line, first, second) returns the kSums terms that an element
/// adds to the sums of its line.
template <class T, size_t kSums, class F>
std::vector<std::array<double, kSums>> line_sums(const Slabs& slabs, const F& f, const View& first,
                                                 const View& second) {
  const RowOperand in[2]{{first, dtype_of<T>}, {second, dtype_of<T>}};
  std::vector<double> parts(slabs.lines() * static_cast<size_t>(slabs.chunks) * kSums);
  // `parts` has the axes [sample][chunk][sum k][channel]. part() returns the elements of all channels.
  const auto part = [&](int64_t sample, int64_t chunk, size_t k) {
    return parts.data() +
           ((sample * slabs.chunks + chunk) * static_cast<int64_t>(kSums) + static_cast<int64_t>(k)) * slabs.channels;
  };
  slabs.for_each([&](const Slab& slab) {
    double* sums[kSums];
    for (size_t k = 0; k < kSums; ++k) sums[k] = part(slab.sample, slab.chunk, k) + slab.channel;
    const size_t line = slabs.line(slab.sample, slab.channel);
    RowBuffer buffers[2];
    for_blocks(slabs, slab, 0, slab.rows, {&in[0], &in[1]}, [&](int64_t r, int64_t rows, int64_t c, int64_t count) {
      const T* x = load<T>(slabs, in[0], slab, r, c, rows * count, buffers[0]);
      const T* v = &first == &second ? x : load<T>(slabs, in[1], slab, r, c, rows * count, buffers[1]);
      if (!slabs.channels_inner) {  // one pass per sum; later passes read the block from the cache
        [&]<size_t... k>(std::index_sequence<k...>) {
          ((*sums[k] += sum_lanes(count, [f, line, x, v](int64_t j) { return f(line, x[j], v[j])[k]; })), ...);
        }
        (std::make_index_sequence<kSums>());
        return;
      }
      for (int64_t i = 0; i < rows; ++i, x += count, v += count) {
        VG_INDEPENDENT
        for (int64_t j = 0; j < count; ++j) {
          const auto terms = f(line + static_cast<size_t>(c + j), x[j], v[j]);
          for (size_t k = 0; k < kSums; ++k) sums[k][c + j] += terms[k];
        }
      }
    });
  });
  std::vector<std::array<double, kSums>> totals(slabs.lines());
  for (int64_t n = 0; n < slabs.samples; ++n)
    for (int64_t chunk = 0; chunk < slabs.chunks; ++chunk)
      for (size_t k = 0; k < kSums; ++k)
        for (int64_t c = 0; c < slabs.channels; ++c) totals[slabs.line(n, c)][k] += part(n, chunk, k)[c];
  return totals;
}

/// Stores the sum of f(line, first, second) over each channel in `sums` (C).
template <class T, class F>
void sum_channels(const Slabs& slabs, const View& sums, const F& f, const View& first, const View& second) {
  const auto lines = line_sums<T, 1>(
      slabs, [&f](size_t line, T x, T v) { return std::array<double, 1>{f(line, x, v)}; }, first, second);
  for (int64_t c = 0; c < slabs.channels; ++c) {
    double total = 0;
    for (int64_t n = 0; n < slabs.samples; ++n) total += lines[slabs.line(n, c)][0];
    set_entry(&sums, c, total);
  }
}

/// Stores the sum of x over each channel in `sums` (C).
inline void sum_channels(const Slabs& slabs, const View& sums, const View& x) {
  dispatch(Floats(), x.dtype, "sum_channels", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    sum_channels<C>(
        slabs, sums, [](size_t, C v, C) { return static_cast<double>(v); }, x, x);
  });
}

/// Calls f(Group) for every group, in parallel. `shape` is (N, groups), or (1, groups) if a group contains all samples.
template <class F>
void for_each_group(const Slabs& slabs, const View& shape, F&& f) {
  const int64_t groups = shape.size[1], channels_per_group = groups > 0 ? slabs.channels / groups : 0;
  const int64_t samples = shape.size[0] == slabs.samples ? 1 : slabs.samples;
  parallel_for(shape.size[0] * groups, grain_of(16 * channels_per_group * samples * slabs.chunks),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   f(Group{i, i / groups, samples, i % groups * channels_per_group, channels_per_group});
               });
}

}  // namespace voxgrad::cpu
