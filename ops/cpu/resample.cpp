// Resampling along one axis: a sparse matrix, made of the taps of ops/resample_taps.h, applied to every line.
// The transposed map is the transposed matrix.
#include <vector>

#include "core/dtype.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/resample_taps.h"

namespace voxgrad::cpu {
namespace {

/// Rows of (column, weight) pairs: entries[begin[r]] up to entries[begin[r + 1]].
struct SparseMatrix {
  struct Entry {
    int64_t column;
    double weight;
  };
  std::vector<size_t> begin{0};
  std::vector<Entry> entries;

  size_t rows() const { return begin.size() - 1; }
};

SparseMatrix matrix_of(const Resample& map, int64_t outputs, int64_t inputs) {
  SparseMatrix matrix;
  for (int64_t o = 0; o < outputs; ++o) {
    const Taps taps = resample_taps(map, o, inputs);
    for (int64_t i = taps.first; i < taps.first + taps.count; ++i)
      matrix.entries.push_back({i, resample_weight(map, o, i, inputs)});
    matrix.begin.push_back(matrix.entries.size());
  }
  return matrix;
}

/// Entries of a row in ascending order of their columns.
SparseMatrix transpose(const SparseMatrix& matrix, int64_t columns) {
  SparseMatrix result;
  result.begin.assign(static_cast<size_t>(columns) + 1, 0);
  for (const auto& entry : matrix.entries) ++result.begin[static_cast<size_t>(entry.column) + 1];
  for (size_t c = 0; c < static_cast<size_t>(columns); ++c) result.begin[c + 1] += result.begin[c];
  result.entries.resize(matrix.entries.size());
  std::vector<size_t> next(result.begin);
  for (size_t r = 0; r < matrix.rows(); ++r)
    for (size_t e = matrix.begin[r]; e < matrix.begin[r + 1]; ++e)
      result.entries[next[static_cast<size_t>(matrix.entries[e].column)]++] = {static_cast<int64_t>(r),
                                                                               matrix.entries[e].weight};
  return result;
}

/// Lines that are summed side by side.
constexpr int64_t kLines = 256;

/// Applies the matrix along one line.
template <class T>
void apply_to_line(const SparseMatrix& matrix, const Offsets<2>& along, T* y, const T* x) {
  for (size_t r = 0; r < matrix.rows(); ++r) {
    double sum = 0;
    for (size_t e = matrix.begin[r]; e < matrix.begin[r + 1]; ++e)
      sum += matrix.entries[e].weight * static_cast<double>(x[matrix.entries[e].column * along[1]]);
    y[static_cast<int64_t>(r) * along[0]] = convert<T>(sum);
  }
}

/// The same along `count` lines, at most kLines, that lie `across` apart.
template <class T>
void apply_to_lines(const SparseMatrix& matrix, const Offsets<2>& along, const Offsets<2>& across, int64_t count, T* y,
                    const T* x) {
  RowBuffer<T> buffer;
  for (size_t r = 0; r < matrix.rows(); ++r) {
    double sums[kLines] = {};
    for (size_t e = matrix.begin[r]; e < matrix.begin[r + 1]; ++e) {
      const double weight = matrix.entries[e].weight;
      const T* in = packed(x + matrix.entries[e].column * along[1], across[1], count, buffer.data());
      for (int64_t j = 0; j < count; ++j) sums[j] += weight * static_cast<double>(in[j]);
    }
    T* out = y + static_cast<int64_t>(r) * along[0];
    for (int64_t j = 0; j < count; ++j) out[j * across[0]] = convert<T>(sums[j]);
  }
}

}  // namespace

void resample(const View& out, const View& in, int axis, const Resample& map, bool transposed) {
  const int64_t outputs = out.size[axis], inputs = in.size[axis];
  if (out.numel() == 0) return;
  SparseMatrix matrix = transposed ? matrix_of(map, inputs, outputs) : matrix_of(map, outputs, inputs);
  if (transposed) matrix = transpose(matrix, outputs);
  const auto nest = make_nest(axis, out, in);
  const Offsets<2> along{out.stride[axis], in.stride[axis]}, across = nest.inner_stride();
  const int64_t work = static_cast<int64_t>(matrix.entries.size()) + outputs;
  dispatch(Floats(), in.dtype, "resample", "CPU", [&]<class T>() {
    for_each_row(
        nest,
        [&](const Offsets<2>& offset, int64_t count) {
          T* y = out.as<T>() + offset[0];
          const T* x = in.as<const T>() + offset[1];
          if (count > 1 && std::abs(across[0]) < std::abs(along[0]))
            apply_to_lines(matrix, along, across, count, y, x);
          else
            for (int64_t j = 0; j < count; ++j) apply_to_line(matrix, along, y + j * across[0], x + j * across[1]);
        },
        kLines, work);
  });
}

}  // namespace voxgrad::cpu
