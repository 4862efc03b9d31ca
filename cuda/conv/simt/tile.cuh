// The tile of the plain convolution kernels, an implicit matrix product in shared memory:
//
//   C[m][n] = sum over k of A[m][k] * B[k][n],   A[m][k] = a[site(m) + row(k)] inside the volume, otherwise 0
//
// The position of an element of A in the volume is the sum of two terms. One term depends on m and is kept by a thread
// (a Site). The other term depends on k and is stored in a table in shared memory (a Row). In fprop and dgrad, m is an
// output voxel and k is a (channel, tap). In wgrad, m is a (channel, tap) and k is a voxel. The three passes differ
// only in their sites and rows. Addresses are 64-bit sums, positions are 32-bit sums.
#pragma once

#include <cstdint>

#include "core/detail/divide.h"
#include "core/error.h"
#include "cuda/detail/launch.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// Threads of a CTA.
inline constexpr int kTileThreads = 256;
/// Upper bound of the magnitude of positions, which check_positions() ensures. Sums of two positions fit into 32 bits.
inline constexpr int kPositionLimit = 1 << 30;

/// The term of `m` in the offset, in elements, and in the position of an element of A.
struct Site {
  int64_t offset;
  int position[3];
};

/// The term of `k` in the offset and position of an element of A, and the offset of the row of B. position[0] is
/// -kPositionLimit if there is no such row.
struct alignas(16) Row {
  int64_t a;
  int64_t b;
  int position[3];
  int unused;
};

/// The sample of a voxel and its indices along three axes.
struct Voxel {
  int64_t sample;
  int index[3];
};

/// Returns voxel `number` of volumes with count[a] voxels along axis a. Samples are the outermost axis.
__device__ inline Voxel voxel_at(int64_t number, const int (&count)[3]) {
  Voxel voxel;
  for (int axis = 2; axis >= 0; --axis) {
    const int64_t quotient = number / count[axis];
    voxel.index[axis] = static_cast<int>(number - quotient * count[axis]);
    number = quotient;
  }
  voxel.sample = number;
  return voxel;
}

/// Returns the voxel that is `steps` (below 2^30) after `voxel`. Uses only 32-bit divisions.
__device__ inline Voxel advance(Voxel voxel, int steps, const int (&count)[3]) {
  unsigned carry = static_cast<unsigned>(steps);
  for (int axis = 2; axis >= 0; --axis) {
    const unsigned index = static_cast<unsigned>(voxel.index[axis]) + carry;
    carry = index / static_cast<unsigned>(count[axis]);
    voxel.index[axis] = static_cast<int>(index - carry * static_cast<unsigned>(count[axis]));
  }
  voxel.sample += carry;
  return voxel;
}

/// A CTA tile of kM x kN results, which the 8 warps of the CTA share. A warp has 32 * kThreadM rows and kThreadN
/// columns. Neighboring lanes have neighboring rows, so that reads of A and stores are coalesced. All lanes have the
/// same columns, so that reads of B are broadcasts.
template <class Element, int kThreadM_, int kThreadN_, int kWarpsN>
struct TileShape {
  using T = Element;
  static constexpr int kThreadM = kThreadM_, kThreadN = kThreadN_;
  static constexpr int kM = kThreadM * kTileThreads / kWarpsN, kN = kThreadN * kWarpsN, kK = 8;
  static constexpr int kRows = 32;                              // rows of the table that are computed at a time
  static constexpr int kBlocks = sizeof(Element) == 4 ? 2 : 1;  // minimum CTAs per SM, which bounds the registers
  static_assert(kTileThreads % kM == 0, "a thread stages one site");
  static_assert(kThreadN * sizeof(T) % 16 == 0, "B is read in 16-byte pieces");

  __device__ static int m_of(int i) {
    const int warp_m = static_cast<int>(threadIdx.x) / 32 / kWarpsN;
    return (warp_m * kThreadM + i) * 32 + static_cast<int>(threadIdx.x) % 32;
  }
  __device__ static int n_of(int j) { return static_cast<int>(threadIdx.x) / 32 % kWarpsN * kThreadN + j; }
};

/// The shared memory of a CTA: two stages of A and B, and two tables of rows.
template <class Tile>
struct alignas(16) TileMemory {
  // With 4 words of padding, the columns that a warp stages are in different banks.
  typename Tile::T a[2][Tile::kK][Tile::kM + 4];
  typename Tile::T b[2][Tile::kK][Tile::kN + 4];
  Row rows[2][Tile::kRows];
};

/// The operands of a product. `size` is the size of the volume that contains A.
template <class T>
struct TileOperands {
  const T* a;
  const T* b;
  int64_t b_stride;  // elements between the columns of B
  int size[3];
  int n_count;  // columns of B
  int k_count;  // rows of B
};

/// Adds the products of one staged k-block to `sum`.
template <class Tile, class T = typename Tile::T>
__device__ void multiply_k_block(T (&sum)[Tile::kThreadM][Tile::kThreadN], const TileMemory<Tile>& memory, int stage) {
  constexpr int kPack = 16 / sizeof(T);
  struct alignas(16) Pack {
    T value[kPack];
  };
#pragma unroll
  for (int k = 0; k < Tile::kK; ++k) {
    T a[Tile::kThreadM];
    Pack b[Tile::kThreadN / kPack];
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; ++i) a[i] = memory.a[stage][k][Tile::m_of(i)];
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j += kPack)
      b[j / kPack] = *reinterpret_cast<const Pack*>(&memory.b[stage][k][Tile::n_of(j)]);
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; ++j) sum[i][j] += a[i] * b[j / kPack].value[j % kPack];
  }
}

/// Loads k-blocks of both operands to registers, and stores them to shared memory. Neighboring threads load neighboring
/// elements of A: neighboring rows of A are neighbors in memory if kRowsAdjacent; otherwise, neighboring sites are.
template <class Tile, bool kRowsAdjacent, class MakeRow>
struct TileProducer {
  using T = typename Tile::T;
  static constexpr int kK = Tile::kK, kTableKBlocks = Tile::kRows / kK;
  static constexpr int kLoadsA = Tile::kM * kK / kTileThreads, kLoadsB = divide_up(Tile::kN * kK, kTileThreads);
  static constexpr int kSites = kRowsAdjacent ? kLoadsA : 1;

  TileMemory<Tile>& memory;
  const TileOperands<T>& operands;
  const MakeRow& make_row;
  const int thread = static_cast<int>(threadIdx.x);
  Site sites[kSites];
  T next_a[kLoadsA];
  T next_b[kLoadsB];

  template <class MakeSite>
  __device__ TileProducer(TileMemory<Tile>& shared, const TileOperands<T>& from, const MakeSite& make_site,
                          const MakeRow& rows)
      : memory(shared), operands(from), make_row(rows) {
#pragma unroll
    for (int l = 0; l < kSites; ++l) sites[l] = make_site(a_site(l));
  }
  /// Computes a table of rows.
  __device__ void fill_rows(int table) const {
    if (thread >= Tile::kRows) return;
    const int k = table * Tile::kRows + thread;
    memory.rows[table & 1][thread] = k < operands.k_count ? make_row(k) : Row{0, 0, {-kPositionLimit, 0, 0}, 0};
  }
  __device__ void load(int k_block) {
    const Row* rows = &memory.rows[k_block / kTableKBlocks & 1][k_block % kTableKBlocks * kK];
#pragma unroll
    for (int l = 0; l < kLoadsA; ++l) {
      const Row& row = rows[a_row(l)];
      const Site& site = sites[kRowsAdjacent ? l : 0];
      bool inside = true;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis)
        inside &= static_cast<unsigned>(site.position[axis] + row.position[axis]) <
                  static_cast<unsigned>(operands.size[axis]);
      next_a[l] = inside ? operands.a[site.offset + row.a] : T(0);
    }
    const Row& row = rows[thread % kK];
#pragma unroll
    for (int l = 0; l < kLoadsB; ++l) {
      const int n = (thread + l * kTileThreads) / kK;
      const bool inside = row.position[0] != -kPositionLimit && n < operands.n_count && n < Tile::kN;
      next_b[l] = inside ? operands.b[row.b + n * operands.b_stride] : T(0);
    }
  }
  __device__ void store(int stage) const {
#pragma unroll
    for (int l = 0; l < kLoadsA; ++l) memory.a[stage][a_row(l)][a_site(l)] = next_a[l];
#pragma unroll
    for (int l = 0; l < kLoadsB; ++l) {
      const int n = (thread + l * kTileThreads) / kK;
      if (n < Tile::kN) memory.b[stage][thread % kK][n] = next_b[l];
    }
  }

 private:
  /// Return the row and the site of load l of this thread in the k-block of A.
  __device__ int a_row(int l) const { return kRowsAdjacent ? thread % kK : (thread + l * kTileThreads) / Tile::kM; }
  __device__ int a_site(int l) const { return kRowsAdjacent ? (thread + l * kTileThreads) / kK : thread % Tile::kM; }
};

/// Computes total[i][j] = C[m_of(i)][n_of(j)]. make_site(m) and make_row(k), for k below k_count, return Sites and
/// Rows. A site outside of the problem has position[0] = -kPositionLimit. TileProducer explains kRowsAdjacent. Sums are
/// added to `total` every 256 products, so that long sums in float are as accurate as short ones. All threads of a CTA
/// must call the function.
template <class Tile, bool kRowsAdjacent, class Total, class T, class MakeSite, class MakeRow>
__device__ void tile_product(Total (&total)[Tile::kThreadM][Tile::kThreadN], TileMemory<Tile>& memory,
                             const TileOperands<T>& operands, MakeSite make_site, MakeRow make_row) {
  constexpr int kFlushKBlocks = 256 / Tile::kK;
  TileProducer<Tile, kRowsAdjacent, MakeRow> producer(memory, operands, make_site, make_row);
  T sum[Tile::kThreadM][Tile::kThreadN] = {};
  const auto flush = [&] {
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; ++j) {
        total[i][j] += static_cast<Total>(sum[i][j]);
        sum[i][j] = 0;
      }
  };

  const int k_blocks = divide_up(operands.k_count, Tile::kK);
  if (k_blocks == 0) return;
  producer.fill_rows(0);
  __syncthreads();
  producer.load(0);
  producer.store(0);
  __syncthreads();
  for (int k_block = 0; k_block < k_blocks; ++k_block) {  // loads the next k-block during the products
    if (k_block % producer.kTableKBlocks == 0) producer.fill_rows(k_block / producer.kTableKBlocks + 1);
    if (k_block + 1 < k_blocks) producer.load(k_block + 1);
    multiply_k_block<Tile>(sum, memory, k_block & 1);
    if (k_block + 1 < k_blocks) producer.store((k_block + 1) & 1);
    if ((k_block + 1) % kFlushKBlocks == 0) flush();
    __syncthreads();
  }
  flush();
}

/// Throws if a position that the convolution computes could reach kPositionLimit.
inline void check_positions(const char* op, const View& x, const View& w, const View& y, const ConvGeometry& geometry) {
  for (int axis = 0; axis < 3; ++axis) {
    const auto product = [&](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
    const double reach = product(geometry.stride[axis], std::max<int64_t>(y.size[axis + 2] - 1, 0)) +
                         product(geometry.dilation[axis], w.size[axis + 2] - 1) +
                         static_cast<double>(geometry.padding[axis]) + static_cast<double>(x.size[axis + 2]);
    check(reach < kPositionLimit, op, "the CUDA kernels support positions below 2^30, including stride, dilation ",
          "and padding; spatial axis ", axis, " reaches ", reach);
  }
}

/// Returns true if the channels of a view (N, C, D, H, W) are closer together in memory than its voxels.
inline bool channels_innermost(const View& view) {
  const auto magnitude = [&](int axis) { return view.stride[axis] < 0 ? -view.stride[axis] : view.stride[axis]; };
  int inner = 4;
  while (inner > 2 && view.size[inner] == 1) --inner;
  return view.size[1] > 1 && magnitude(1) < magnitude(inner);
}

}  // namespace voxgrad::cuda
