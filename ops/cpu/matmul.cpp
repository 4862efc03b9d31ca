// Batched matrix products with Eigen, in tiles of c. The tiles depend only on the shape, and one thread computes a
// tile, so the order of every sum is the same for any number of threads.
#include <vector>

#include "ops/cpu/eigen.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kTileColumns = 512;

template <class T, int order>
using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, order>;
template <class Matrix>
using Map = Eigen::Map<Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;

/// A part of a matrix with elements of type T (float or double), whose rows or columns are contiguous.
template <class T>
struct Operand {
  const T* data;
  int64_t rows;
  int64_t columns;
  int64_t row_step;
  int64_t column_step;

  /// Refers to the matrix at `from` without a copy if possible. Copies the matrix to `buffer` if no axis is contiguous,
  /// or if the elements are bf16 or f16.
  template <class From>
  Operand(const From* from, int64_t m, int64_t n, int64_t row, int64_t column, std::vector<T>& buffer)
      : rows(m), columns(n), row_step(row), column_step(column) {
    if constexpr (std::is_same_v<T, From>) {
      data = from;
      if (by_rows() || by_columns()) return;
    }
    buffer.resize(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        buffer[static_cast<size_t>(i * columns + j)] = convert<T>(from[i * row_step + j * column_step]);
    data = buffer.data();
    row_step = columns;
    column_step = 1;
  }
  bool by_rows() const { return (column_step == 1 || columns == 1) && row_step >= 0; }
  bool by_columns() const { return (row_step == 1 || rows == 1) && column_step >= 0; }

  /// Calls f with an Eigen matrix of the elements.
  template <class F>
  void visit(F&& f) const {
    if (by_rows())
      f(Map<const Dense<T, Eigen::RowMajor>>(data, rows, columns, Eigen::OuterStride<>(row_step)));
    else
      f(Map<const Dense<T, Eigen::ColMajor>>(data, rows, columns, Eigen::OuterStride<>(column_step)));
  }
};

/// Computes the matrix product `a` * `b` and stores it in `out`, which is row-major.
template <class T>
void store_product(T* out, int64_t row_step, const Operand<T>& a, const Operand<T>& b) {
  Map<Dense<T, Eigen::RowMajor>> product(out, a.rows, b.columns, Eigen::OuterStride<>(row_step));
  a.visit([&](const auto& l) { b.visit([&](const auto& r) { product.noalias() = l * r; }); });
}

}  // namespace

void matmul(const View& c, const View& a, const View& b) {
  const int64_t batches = c.size[0], m = c.size[1], n = c.size[2], depth = a.size[2];
  if (c.numel() == 0) return;
  if (depth == 0) return fill(c, 0);
  const int64_t down = divide_up(m, kTileRows), across = divide_up(n, kTileColumns);
  const int64_t work = std::min(m, kTileRows) * std::min(n, kTileColumns) * depth / 8;
  dispatch(Floats(), c.dtype, "matmul", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    parallel_for(batches * down * across, grain_of(work), [&](int64_t begin, int64_t end) {
      std::vector<C> left_buffer, right_buffer, product;
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t batch = tile / (down * across);
        const int64_t i = tile / across % down * kTileRows, j = tile % across * kTileColumns;
        const int64_t rows = std::min(kTileRows, m - i), columns = std::min(kTileColumns, n - j);
        T* out = c.as<T>() + batch * c.stride[0] + i * c.stride[1] + j;
        const Operand<C> left(a.as<const T>() + batch * a.stride[0] + i * a.stride[1], rows, depth, a.stride[1],
                              a.stride[2], left_buffer);
        const Operand<C> right(b.as<const T>() + batch * b.stride[0] + j * b.stride[2], depth, columns, b.stride[1],
                               b.stride[2], right_buffer);
        if constexpr (std::is_same_v<T, C>) {
          store_product(out, c.stride[1], left, right);
        } else {
          product.resize(static_cast<size_t>(rows * columns));
          store_product(product.data(), columns, left, right);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < columns; ++k)
              out[r * c.stride[1] + k] = T(product[static_cast<size_t>(r * columns + k)]);
        }
      }
    });
  });
}

}  // namespace voxgrad::cpu
