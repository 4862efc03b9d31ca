// Copies between layouts whose innermost axes differ, as from contiguous to channels_last: a transposition in two axes,
// once for each position of the others. A block brings a tile to shared memory in vectors along the input's innermost
// axis and takes it out in vectors along the output's.
#pragma once

#include "core/detail/divide.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda {

/// How a block goes over an operand's part of a tile: rows along the operand's innermost axis, in slots that begin at
/// aligned addresses. Rows that touch in memory but are not whole vectors are joined to one.
struct TileSide {
  int64_t step;    // from row to row
  uint32_t width;  // of a slot: a vector, or one element of rows that are shorter
  bool joined;
  Divider wrap, slots;  // elements of a row where rows are joined, else more than there are; slots of a row
};

/// Axis 0 is the output's innermost, axis 1 the input's.
struct Transpose {
  const void* in;
  void* out;
  TileSide from, to;
  uint32_t size[2], tile[2], tiles;
  Divider parts[2];      // into which tiles cut the axes
  uint32_t pitch, skew;  // of shared memory; skew > 0: it takes vectors
  Offsets<2> outer;
};

template <class T>
struct TileSlot {
  uint32_t row;
  int first, end;  // of its elements in the row, of which those below 0 are not there

  __device__ TileSlot(const TileSide& side, const T* tile, uint32_t number, uint32_t length)
      : row(side.slots.divide(number)) {
    const auto place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile + row * side.step) / sizeof(T));
    first = static_cast<int>((number - row * side.slots.divisor) * side.width - (place & (side.width - 1)));
    end = min(static_cast<int>(length), first + static_cast<int>(side.width));
  }
  __device__ bool whole() const { return first >= 0 && first + kVectorWidth<T> <= end; }
  /// Calls f(j, row, place in the row) for the j-th element of those that are there; `all`: whole().
  template <bool all, class F>
  __device__ void walk(const TileSide& side, const F& f) const {
    uint32_t across = static_cast<uint32_t>(max(first, 0)), along = side.wrap.take(across);
    across += row;
#pragma unroll
    for (int j = 0; j < kVectorWidth<T>; ++j) {
      if (!all && first + j >= end) break;
      if (!all && first + j < 0) continue;
      f(j, across, along);
      if (++along == side.wrap.divisor) along = 0, ++across;
    }
  }
};

/// A tile in shared memory, in the smaller of the types. The skew lets threads that read a vector's element of one
/// place, each `group` rows from the next, meet different banks.
template <class T, int group>
struct SharedTile {
  T* data;
  uint32_t pitch, skew;
  __device__ T* at(uint32_t row, uint32_t column) const { return data + row * pitch + row / group * skew + column; }
};

/// In one instruction, which the compiler left to itself makes four of.
template <class T, int width>
__device__ void store_shared(T* data, const Vector<T, width>& vector) {
  if constexpr (sizeof(vector) == 16) {
    const auto word = std::bit_cast<uint4>(vector);
    asm volatile(
        "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(data))),
        "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
        : "memory");
  } else {
    store_vector(data, vector);
  }
}

/// What becomes of an element on its way; `row`: its place along the output's innermost axis.
template <class To>
struct ConvertElement {
  template <class From>
  __device__ To operator()(From x, uint32_t) const {
    return convert<To>(x);
  }
};

template <class From, class Tile, class Map>
__device__ void load_tile(const Tile& tile, const TileSide& side, const From* in, uint32_t rows, uint32_t length,
                          uint32_t first_row, const Map& map) {
  using T = std::remove_pointer_t<decltype(tile.data)>;
  constexpr int width = kVectorWidth<From>, unroll = width > 8 ? 2 : 4;
  const uint32_t slots = rows * side.slots.divisor;
  for (uint32_t i = threadIdx.x; i < slots; i += unroll * blockDim.x) {
    Loading<From, width> loaded[unroll];
    const auto slot_of = [&](int u) {
      const uint32_t number = i + u * blockDim.x;
      return TileSlot<From>(side, in, number, number < slots ? length : 0);
    };
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const TileSlot<From> slot = slot_of(u);
      loaded[u] = load_slot<width>(in + slot.row * side.step, false, slot.first, slot.whole(), slot.end);
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const TileSlot<From> slot = slot_of(u);
      const Vector<From, width> x = loaded[u].get();
      if (tile.skew > 0 && slot.whole() && slot.first % width == 0) {
        Vector<T, width> y;
#pragma unroll
        for (int j = 0; j < width; ++j) y.v[j] = map(x.v[j], first_row + slot.row);
        store_shared(tile.at(slot.row, slot.first), y);
      } else {
        slot.template walk<false>(
            side, [&](int j, uint32_t row, uint32_t column) { *tile.at(row, column) = map(x.v[j], first_row + row); });
      }
    }
  }
}

template <class To, class Tile>
__device__ void store_tile(const Tile& tile, const TileSide& side, To* out, uint32_t rows, uint32_t length) {
  constexpr int width = kVectorWidth<To>;
  const uint32_t slots = rows * side.slots.divisor;
  for (uint32_t i = threadIdx.x; i < slots; i += blockDim.x) {
    const TileSlot<To> slot(side, out, i, length);
    To* const to = out + slot.row * side.step + slot.first;
    const bool whole = slot.whole();
    Vector<To, width> y;
    if (whole && !side.joined && slot.first % width == 0) {  // in one group of rows
      const auto* x = tile.at(slot.first, slot.row);
#pragma unroll
      for (int j = 0; j < width; ++j) y.v[j] = convert<To>(x[j * tile.pitch]);
    } else if (whole) {
      slot.template walk<true>(
          side, [&](int j, uint32_t column, uint32_t row) { y.v[j] = convert<To>(*tile.at(row, column)); });
    } else {
      slot.template walk<false>(
          side, [&](int j, uint32_t column, uint32_t row) { to[j] = convert<To>(*tile.at(row, column)); });
    }
    if (whole) store_vector(to, y);
  }
}

template <class To, class From>
using SharedElement = std::conditional_t<sizeof(To) < sizeof(From), To, From>;

template <class To, class From, class Map>
__global__ void __launch_bounds__(kBlock, 3) transpose_kernel(const __grid_constant__ Transpose p, Map map) {
  using Shared = SharedElement<To, From>;
  extern __shared__ uint4 memory[];
  const SharedTile<Shared, kVectorWidth<To>> tile{reinterpret_cast<Shared*>(memory), p.pitch, p.skew};
  for (uint32_t item = blockIdx.x; item < p.tiles; item += gridDim.x) {
    uint32_t number = item, first[2], n[2];
#pragma unroll
    for (int axis = 0; axis < 2; ++axis) {
      first[axis] = p.parts[axis].take(number) * p.tile[axis];
      n[axis] = min(p.tile[axis], p.size[axis] - first[axis]);
    }
    int64_t offset[2];
    p.outer.at(number, offset);
    const From* in = static_cast<const From*>(p.in) + offset[1] + first[0] * p.from.step + first[1];
    To* out = static_cast<To*>(p.out) + offset[0] + first[1] * p.to.step + first[0];
    const uint32_t all = n[0] * n[1];
    load_tile(tile, p.from, in, p.from.joined ? 1 : n[0], p.from.joined ? all : n[1], first[0], map);
    __syncthreads();
    store_tile(tile, p.to, out, p.to.joined ? 1 : n[1], p.to.joined ? all : n[0]);
    __syncthreads();
  }
}

/// Tiles along an axis: all of it if it is not longer than `most`, else nearly equal parts of whole vectors.
inline int64_t tile_length(int64_t size, int64_t most, int64_t width) {
  if (size <= most) return size;
  most -= most % width;
  const int64_t parts = divide_up(size, most);
  return (size + parts * width - 1) / (parts * width) * width;
}

/// The side of view k, along `own` of the nest's axes; `across`: the other one of the tile.
template <class T>
TileSide tile_side(const T* data, const Nest<2>& nest, size_t k, int own, int across, int64_t length, int64_t rows) {
  constexpr int64_t width = kVectorWidth<T>;
  const int64_t step = nest.stride[across][k];
  const bool joined = step == length && length == nest.size[own] && length % width != 0;
  TileSide side{step, width, joined, Divider(joined ? length : INT32_MAX), Divider()};
  bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int axis = 0; axis < nest.rank; ++axis)  // a tile of joined rows begins at whole vectors of them
    aligned &= axis == own || (joined && axis == across) || nest.stride[axis][k] % width == 0;
  if (joined) length *= rows;
  if (k == 0 && length < width) side.width = 1;  // so that neighbours write side by side
  const int64_t lead = aligned ? 0 : side.width - 1;
  side.slots = Divider(divide_up(length + lead, side.width));
  return side;
}

template <class To, class From, class Map>
void launch_transpose(To* out, const From* in, const Nest<2>& nest, int axis, const Map& map, cudaStream_t stream) {
  constexpr int64_t narrow = std::min(sizeof(To), sizeof(From)), width = 16 / narrow;
  constexpr int64_t most = 16384 / static_cast<int64_t>(std::max(sizeof(To), sizeof(From)));
  int64_t elements = most, edge = 32;
  while (elements > 1024 && nest.numel() < 512 * elements) elements /= 2;  // blocks enough for all multiprocessors
  while (4 * edge * edge <= elements) edge *= 2;
  const int64_t a = nest.size[0], b = nest.size[axis];
  const int64_t tile_a = tile_length(a, std::max(a <= 2 * edge ? a : edge, elements / b), width);
  const int64_t tile_b = tile_length(b, elements / tile_a, width);

  Nest<2> outer;
  for (int other = 1; other < nest.rank; ++other) {
    if (other == axis) continue;
    outer.size[outer.rank] = nest.size[other];
    std::copy_n(nest.stride[other], 2, outer.stride[outer.rank++]);
  }
  Transpose p{in, out, {}, {}, {}, {}, 0, {}, 0, 0, Offsets<2>(outer)};
  p.from = tile_side(in, nest, 1, axis, 0, tile_b, tile_a);
  p.to = tile_side(out, nest, 0, 0, axis, tile_a, tile_b);
  const int64_t sizes[] = {a, b}, lengths[] = {tile_a, tile_b};
  int64_t tiles = outer.numel();
  for (int i = 0; i < 2; ++i) {
    const int64_t parts = (sizes[i] + lengths[i] - 1) / lengths[i];
    p.size[i] = static_cast<uint32_t>(sizes[i]);
    p.tile[i] = static_cast<uint32_t>(lengths[i]);
    p.parts[i] = Divider(parts);
    tiles *= parts;
  }
  p.tiles = static_cast<uint32_t>(tiles);
  const bool vectors = !p.from.joined && (tile_b % width == 0 || tile_b >= 4 * width);
  p.pitch = static_cast<uint32_t>(vectors ? round_up(tile_b, width) : tile_b | 1);
  p.skew = vectors ? width : 0;
  const int64_t shared = narrow * (tile_a * p.pitch + tile_a / kVectorWidth<To> * p.skew);
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>((tile_a * tile_b / 8 + 31) / 32 * 32, 64, kBlock));
  transpose_kernel<To, From><<<grid_size(tiles, 1), threads, static_cast<size_t>(shared), stream>>>(p, map);
  check_launch("copy");
}

/// Copies `in` to `out`, whose `nest` this is; `axis`: transposed_axis() of it. `map` makes of an element one of the
/// smaller type.
template <class To, class From, class Map = ConvertElement<SharedElement<To, From>>>
void transpose(const View& out, const View& in, const Nest<2>& nest, int axis, const Map& map = {}) {
  const Launch launch(out);
  for_each_part(nest, [&](const Nest<2>& part, const std::array<int64_t, 2>& base) {
    launch_transpose(out.as<To>() + base[0], in.as<From>() + base[1], part, axis, map, launch.stream);
  });
}

/// Of the views of a copy, the axis along which the second is contiguous where the first is so along axis 0; 0 if
/// there is none, or too little to gain.
inline int transposed_axis(const Nest<2>& nest) {
  constexpr int64_t kSmallest = 512;
  const int64_t step = nest.stride[0][1];
  if (nest.numel() == 0 || nest.stride[0][0] != 1 || step == 0 || step == 1) return 0;
  for (int axis = 1; axis < nest.rank; ++axis)
    if (nest.stride[axis][1] == 1 && nest.size[0] * nest.size[axis] >= kSmallest) return axis;
  return 0;
}

}  // namespace voxgrad::cuda
