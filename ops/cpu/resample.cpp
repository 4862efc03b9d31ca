// Resampling along three axes at once. A row of the output is computed in two steps: sum the rows of the input with the
// weights of depth and height, then resample the sum along the width. The map of an axis is stored as a sparse matrix,
// which ops/detail/resample_taps.h computes. Sums are in double and rounded once.
#include <vector>

#include "ops/cpu/loops.h"
#include "ops/detail/resample_taps.h"

namespace voxgrad::cpu {
namespace {

/// A sparse matrix in compressed rows: row r has the entries begin[r] to begin[r + 1] - 1.
struct SparseMatrix {
  struct Entry {
    int64_t column;
    double weight;
  };
  std::vector<size_t> begin{0};
  std::vector<Entry> entries;

  SparseMatrix(const Resample& map, bool transposed, int64_t rows, int64_t columns) {
    const int64_t n = transposed ? rows : columns, outputs = transposed ? columns : rows;
    for (int64_t r = 0; r < rows; ++r) {
      for_terms(map, transposed, r, n, outputs, [&](int64_t c, double weight) { entries.push_back({c, weight}); });
      begin.push_back(entries.size());
    }
  }
  std::span<const Entry> row(int64_t r) const {
    const auto i = static_cast<size_t>(r);
    return std::span(entries).subspan(begin[i], begin[i + 1] - begin[i]);
  }
};

/// Largest number of lanes. The lanes are the channels that are summed together: up to kLanes channels if channels are
/// innermost, otherwise one channel.
constexpr int64_t kLanes = 64;

struct ResampleProblem {
  View out;
  View in;
  SparseMatrix axes[3];  // the maps along D, H and W
};

/// Computes sums[i] += weight * x[i * step].
template <class T>
void add_row(double* sums, const T* x, int64_t step, int64_t count, double weight) {
  if (step == 1)
    for (int64_t i = 0; i < count; ++i) sums[i] += weight * static_cast<double>(x[i]);
  else
    for (int64_t i = 0; i < count; ++i) sums[i] += weight * static_cast<double>(x[i * step]);
}

/// Computes row (d, h) of `lanes` channels. x and y point to the first of these channels. `columns` is a buffer for a
/// row of the input.
template <class T>
void resample_row(const ResampleProblem& p, int64_t d, int64_t h, int64_t lanes, T* y, const T* x,
                  std::vector<double>& columns) {
  const int64_t width = p.in.size[4];
  std::fill(columns.begin(), columns.end(), 0.0);
  for (const auto& plane : p.axes[0].row(d))
    for (const auto& row : p.axes[1].row(h)) {
      const T* from = x + plane.column * p.in.stride[2] + row.column * p.in.stride[3];
      const double weight = plane.weight * row.weight;
      if (lanes == 1) {
        add_row(columns.data(), from, p.in.stride[4], width, weight);
        continue;
      }
      for (int64_t w = 0; w < width; ++w)
        add_row(columns.data() + w * lanes, from + w * p.in.stride[4], p.in.stride[1], lanes, weight);
    }
  for (int64_t w = 0; w < p.out.size[4]; ++w) {
    if (lanes == 1) {
      double sum = 0;
      for (const auto& entry : p.axes[2].row(w)) sum += entry.weight * columns[static_cast<size_t>(entry.column)];
      y[w * p.out.stride[4]] = convert<T>(sum);
      continue;
    }
    double sums[kLanes] = {};
    for (const auto& entry : p.axes[2].row(w))
      add_row(sums, columns.data() + entry.column * lanes, 1, lanes, entry.weight);
    for (int64_t c = 0; c < lanes; ++c) y[w * p.out.stride[4] + c * p.out.stride[1]] = convert<T>(sums[c]);
  }
}

}  // namespace

void resample(const View& out, const View& in, const ResampleMaps& maps, bool transposed) {
  if (out.numel() == 0) return;
  const auto matrix = [&](size_t axis) {
    return SparseMatrix(maps[axis], transposed, out.size[axis + 2], in.size[axis + 2]);
  };
  const ResampleProblem p{out, in, {matrix(0), matrix(1), matrix(2)}};
  const bool channels_inner = in.size[1] > 1 && std::abs(in.stride[1]) < std::abs(in.stride[4]);
  const int64_t max_lanes = channels_inner ? kLanes : 1;
  const int64_t parts = divide_up(out.size[1], max_lanes), depth = out.size[2];
  const int64_t terms = static_cast<int64_t>(p.axes[1].entries.size() * p.axes[0].entries.size()) / depth;
  dispatch(Floats(), in.dtype, "resample", "CPU", [&]<class T>() {
    const int64_t work = (terms * in.size[4] + out.size[3] * out.size[4]) * std::min(max_lanes, out.size[1]);
    parallel_for(out.size[0] * parts * depth, grain_of(work), [&](int64_t begin, int64_t end) {
      std::vector<double> columns;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t d = i % depth, channel = i / depth % parts * max_lanes, n = i / depth / parts;
        const int64_t lanes = std::min(max_lanes, out.size[1] - channel);
        columns.resize(static_cast<size_t>(lanes * in.size[4]));
        T* y = out.as<T>() + n * out.stride[0] + channel * out.stride[1] + d * out.stride[2];
        const T* x = in.as<const T>() + n * in.stride[0] + channel * in.stride[1];
        for (int64_t h = 0; h < out.size[3]; ++h) resample_row(p, d, h, lanes, y + h * out.stride[3], x, columns);
      }
    });
  });
}

}  // namespace voxgrad::cpu
