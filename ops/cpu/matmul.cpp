// Batched matrix products: Eigen's gemm on tiles of c. The tiles follow from the shape alone and each is computed
// by one thread, so the order of every sum is the same for any number of threads.
#include "core/dtype.h"
#include "ops/cpu/eigen.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kTileColumns = 512;

template <class T, int order>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, order>;
template <class M>
using MatrixMap = Eigen::Map<M, Eigen::Unaligned, Eigen::OuterStride<>>;

/// Part of a matrix anywhere in memory.
template <class T>
struct Operand {
  const T* data;
  int64_t rows, columns, row_step, column_step;

  /// Calls f with an Eigen matrix of the same elements, copied where no axis is contiguous and where they are halves.
  template <class F>
  void visit(F&& f) const {
    using C = compute_t<T>;
    if constexpr (std::is_same_v<T, C>) {
      if ((column_step == 1 || columns == 1) && row_step >= 0)
        return f(MatrixMap<const Matrix<T, Eigen::RowMajor>>(data, rows, columns, Eigen::OuterStride<>(row_step)));
      if ((row_step == 1 || rows == 1) && column_step >= 0)
        return f(MatrixMap<const Matrix<T, Eigen::ColMajor>>(data, rows, columns, Eigen::OuterStride<>(column_step)));
    }
    Matrix<C, Eigen::RowMajor> copy(rows, columns);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) copy(i, j) = convert<C>(data[i * row_step + j * column_step]);
    f(copy);
  }
};

/// out = l * r, a tile of a row-major matrix.
template <class T, class L, class R>
void store_product(T* out, int64_t row_step, const L& l, const R& r) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    MatrixMap<Matrix<T, Eigen::RowMajor>>(out, l.rows(), r.cols(), Eigen::OuterStride<>(row_step)).noalias() = l * r;
  } else {
    const Matrix<compute_t<T>, Eigen::RowMajor> product = l * r;
    for (int64_t i = 0; i < product.rows(); ++i)
      for (int64_t j = 0; j < product.cols(); ++j) out[i * row_step + j] = T(product(i, j));
  }
}

}  // namespace

void matmul(const View& c, const View& a, const View& b) {
  const int64_t batches = c.size[0], m = c.size[1], n = c.size[2], depth = a.size[2];
  if (c.numel() == 0) return;
  if (depth == 0) return fill(c, 0);
  const int64_t down = (m + kTileRows - 1) / kTileRows, across = (n + kTileColumns - 1) / kTileColumns;
  const int64_t work = std::min(m, kTileRows) * std::min(n, kTileColumns) * depth / 8;
  dispatch(Floats(), c.dtype, "matmul", "CPU", [&]<class T>() {
    parallel_for(batches * down * across, grain_of(work), [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t batch = tile / (down * across);
        const int64_t i = tile / across % down * kTileRows, j = tile % across * kTileColumns;
        const int64_t rows = std::min(kTileRows, m - i), columns = std::min(kTileColumns, n - j);
        T* out = c.as<T>() + batch * c.stride[0] + i * c.stride[1] + j;
        const Operand<T> left{a.as<const T>() + batch * a.stride[0] + i * a.stride[1], rows, depth, a.stride[1],
                              a.stride[2]};
        const Operand<T> right{b.as<const T>() + batch * b.stride[0] + j * b.stride[2], depth, columns, b.stride[1],
                               b.stride[2]};
        left.visit([&](const auto& l) { right.visit([&](const auto& r) { store_product(out, c.stride[1], l, r); }); });
      }
    });
  });
}

}  // namespace voxgrad::cpu
