// The register tiles for f32 and f64.
#include "ops/cpu/conv_tile.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/detail/divide.h"
#include "ops/cpu/vectors.h"

namespace voxgrad::cpu {
namespace {

/// Returns the number of rows of a tile whose columns fill `vectors` vectors. Three quarters of the registers hold
/// sums, and the others hold operands.
constexpr int tile_rows(int vectors) { return std::min(kMaxTileRows, kVectorRegisters * 3 / 4 / vectors); }

template <class T, int bytes, int vectors, int rows>
void tile_product(const TileProduct<T>& product) {
  using Vector = typename VectorOf<T, bytes>::Type;
  constexpr int lanes = bytes / static_cast<int>(sizeof(T));
  Vector sums[rows * vectors] = {};
  const auto address = [&](int i) { return product.c + i / vectors * product.c_step + i % vectors * lanes; };
  if (product.adds) unrolled<rows * vectors>([&](auto i) { std::memcpy(&sums[i], address(i), bytes); });
  for (const TileSegment& segment : product.segments) {
    const T* a = product.a + segment.a;
    const T* b = product.b + segment.b;
    for (int64_t k = 0; k < product.depth; ++k, a += product.a_step, b += product.b_step) {
      Vector columns[vectors];
      unrolled<vectors>([&](auto v) { std::memcpy(&columns[v], b + v * lanes, bytes); });
      unrolled<rows>([&](auto m) {
        const T x = a[m];
        unrolled<vectors>([&](auto v) { sums[m * vectors + v] += x * columns[v]; });
      });
    }
  }
  unrolled<rows * vectors>([&](auto i) { std::memcpy(address(i), &sums[i], bytes); });
}

template <class T, int bytes, int vectors>
const TileFamily<T>* tile_family() {
  constexpr int max_rows = tile_rows(vectors);
  static constexpr TileFamily<T> family = []<int... m>(std::integer_sequence<int, m...>) {
    return TileFamily<T>{
        vectors * bytes / static_cast<int>(sizeof(T)), max_rows, {tile_product<T, bytes, vectors, m + 1>...}};
  }
  (std::make_integer_sequence<int, max_rows>{});
  return &family;
}

}  // namespace

// If all channels fit in half a vector, the only block has half a vector. Otherwise, blocks have two vectors. If the
// number of vectors is odd, one block has three vectors, or one vector if there are no others.
template <class T>
std::vector<ColumnBlock<T>> column_blocks(int64_t channels) {
  std::vector<ColumnBlock<T>> blocks;
  int64_t first = 0;
  auto add = [&](const TileFamily<T>* family) {
    blocks.push_back({first, std::min<int64_t>(family->columns, channels - first), family});
    first += family->columns;
  };
  const int64_t bytes = channels * static_cast<int64_t>(sizeof(T));
  int64_t vectors = divide_up(bytes, kVectorBytes);
  if (bytes <= kHalfVectorBytes) {
    add(tile_family<T, kHalfVectorBytes, 1>());
    return blocks;
  }
  if (vectors == 1) add(tile_family<T, kVectorBytes, 1>());
  if (vectors % 2 == 1 && vectors > 1) {
    add(tile_family<T, kVectorBytes, 3>());
    vectors -= 3;
  }
  for (; vectors >= 2; vectors -= 2) add(tile_family<T, kVectorBytes, 2>());
  return blocks;
}
template std::vector<ColumnBlock<float>> column_blocks(int64_t channels);
template std::vector<ColumnBlock<double>> column_blocks(int64_t channels);

}  // namespace voxgrad::cpu
