// Copies between layouts with different innermost axes, such as contiguous to channels_last: a transposition of two
// axes at every position of the other axes. A CTA loads a tile into shared memory in vectors along the innermost axis
// of the input, and stores it in vectors along the innermost axis of the output.
#pragma once

#include "core/detail/divide.h"
#include "cuda/map.cuh"

namespace voxgrad::cuda {

/// The rows of a tile in the input or the output. A row lies along the innermost axis of its tensor and consists of
/// slots, which begin at aligned addresses. If the rows of a tile follow each other in memory without gaps, but their
/// length is not a multiple of the vector width, all rows of the tile are joined to one long row.
struct TileSide {
  int64_t step;    ///< elements from one row to the next
  uint32_t width;  ///< elements of a slot: a vector, or 1 if rows are shorter than a vector
  bool joined;     ///< all rows of the tile are one row
  Divisor wrap;    ///< elements of an original row if rows are joined, otherwise larger than any index
  Divisor slots;   ///< slots of a row
};

/// The arguments of transpose_kernel. Axis 0 is the innermost axis of the output, and axis 1 is the innermost axis of
/// the input.
struct Transpose {
  const void* in;
  void* out;
  TileSide from;
  TileSide to;
  uint32_t size[2];
  uint32_t tile[2];  ///< elements of a tile along each axis
  uint32_t tiles;    ///< number of tiles
  Divisor parts[2];  ///< tiles along each axis
  uint32_t pitch;    ///< elements of a row of shared memory
  uint32_t skew;     ///< see SharedTile; 0 if shared memory is not written in vectors
  Offsets<2> outer;  ///< offsets along the other axes, in the output and in the input
};

/// One slot of a row.
template <class T>
struct TileSlot {
  uint32_t row;
  int first;  ///< index of the first element within the row; negative if the slot begins before the row
  int end;    ///< index of the last element within the row, plus 1

  /// Computes slot `number` of a tile whose rows have `length` elements.
  __device__ TileSlot(const TileSide& side, const T* tile, uint32_t number, uint32_t length) : row(number) {
    const uint32_t slot = side.slots.take_digit(row);
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile + row * side.step) / sizeof(T));
    first = static_cast<int>(slot * side.width - (address & (side.width - 1)));
    end = min(static_cast<int>(length), first + static_cast<int>(side.width));
  }
  /// Returns whether the slot is a whole vector.
  __device__ bool whole() const { return first >= 0 && first + kVectorWidth<T> <= end; }
  /// Calls f(j, row, index in the row) for every element j of the slot that lies within the row. If rows are joined,
  /// the row and the index are those of the original row. If `all`, skips the bounds checks; whole() must then be true.
  template <bool all, class F>
  __device__ void walk(const TileSide& side, const F& f) const {
    uint32_t across = static_cast<uint32_t>(max(first, 0));
    uint32_t along = side.wrap.take_digit(across);
    across += row;
#pragma unroll
    for (int j = 0; j < kVectorWidth<T>; ++j) {
      if (!all && first + j >= end) break;
      if (!all && first + j < 0) continue;
      f(j, across, along);
      if (++along == static_cast<uint32_t>(side.wrap.value())) {
        along = 0;
        ++across;
      }
    }
  }
};

/// A tile in shared memory. Every `group` rows are followed by `skew` unused elements. Without the unused elements,
/// threads that read one column with a distance of `group` rows between them would access the same bank.
template <class T, int group>
struct SharedTile {
  T* data;
  uint32_t pitch;
  uint32_t skew;
  __device__ T* at(uint32_t row, uint32_t column) const { return data + row * pitch + row / group * skew + column; }
};

/// Stores a vector of 16 bytes with one st.shared.v4; the compiler would emit four stores.
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

/// Converts an element to the type of the tile.
template <class To>
struct ConvertElement {
  template <class From>
  __device__ To operator()(From x, uint32_t) const {
    return convert<To>(x);
  }
};

/// Loads `rows` rows of `length` elements into the tile. Each thread keeps `unroll` vectors in flight. `first_row` is
/// the index of the tile's first row along the innermost axis of the output.
template <class From, class Tile, class Map>
__device__ void load_tile(const Tile& tile, const TileSide& side, const From* in, uint32_t rows, uint32_t length,
                          uint32_t first_row, const Map& map) {
  using T = std::remove_pointer_t<decltype(tile.data)>;
  constexpr int width = kVectorWidth<From>, unroll = width > 8 ? 2 : 4;
  const uint32_t slots = rows * static_cast<uint32_t>(side.slots.value());
  for (uint32_t i = threadIdx.x; i < slots; i += unroll * blockDim.x) {
    PackedVector<From, width> loaded[unroll];
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

/// Stores `rows` rows of `length` elements from the tile, in which these rows are columns.
template <class To, class Tile>
__device__ void store_tile(const Tile& tile, const TileSide& side, To* out, uint32_t rows, uint32_t length) {
  constexpr int width = kVectorWidth<To>;
  const uint32_t slots = rows * static_cast<uint32_t>(side.slots.value());
  for (uint32_t i = threadIdx.x; i < slots; i += blockDim.x) {
    const TileSlot<To> slot(side, out, i, length);
    To* const to = out + slot.row * side.step + slot.first;
    const bool whole = slot.whole();
    Vector<To, width> y;
    if (whole && !side.joined && slot.first % width == 0) {  // the vector lies within one group of rows
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

/// The type of the elements in shared memory: the smaller of To and From.
template <class To, class From>
using SharedElement = std::conditional_t<sizeof(To) < sizeof(From), To, From>;

/// Transposes one tile per iteration: out = map(in), converted to To. map(x, index) is applied to every element before
/// it is written to shared memory; `index` is the element's index along the innermost axis of the output. Launch: one
/// CTA per tile in a 1-D grid-stride loop, with 64 to kBlock threads. Dynamic shared memory: one tile of SharedElement.
template <class To, class From, class Map>
__global__ void __launch_bounds__(kBlock, 3) transpose_kernel(const __grid_constant__ Transpose p, Map map) {
  wait_for_previous_kernels();
  using Shared = SharedElement<To, From>;
  extern __shared__ uint4 memory[];
  const SharedTile<Shared, kVectorWidth<To>> tile{reinterpret_cast<Shared*>(memory), p.pitch, p.skew};
  for (uint32_t item = blockIdx.x; item < p.tiles; item += gridDim.x) {
    uint32_t number = item, first[2], n[2];
#pragma unroll
    for (int axis = 0; axis < 2; ++axis) {
      first[axis] = p.parts[axis].take_digit(number) * p.tile[axis];
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

/// Returns the length of tiles along an axis: the whole axis if it has at most `max_length` elements, otherwise the
/// length of nearly equal parts that are multiples of `width`.
inline int64_t tile_length(int64_t size, int64_t max_length, int64_t width) {
  if (size <= max_length) return size;
  max_length -= max_length % width;
  const int64_t parts = divide_up(size, max_length);
  return divide_up(size, parts * width) * width;
}

/// Returns the TileSide of view k of the nest. The view is contiguous along axis `own`; `across` is the other axis of
/// the tile. The tile has `length` elements along `own` and `rows` elements along `across`.
template <class T>
TileSide tile_side(const T* data, const Nest<2>& nest, size_t k, int own, int across, int64_t length, int64_t rows) {
  constexpr int64_t width = kVectorWidth<T>;
  const int64_t step = nest.stride[across][k];
  const bool joined = step == length && length == nest.size[own] && length % width != 0;
  TileSide side{step, width, joined, Divisor(joined ? length : INT32_MAX), Divisor()};
  bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  // A tile of joined rows begins at a multiple of `width` rows, so that its first element is aligned.
  for (int axis = 0; axis < nest.rank; ++axis)
    aligned &= axis == own || (joined && axis == across) || nest.stride[axis][k] % width == 0;
  if (joined) length *= rows;
  if (k == 0 && length < width) side.width = 1;  // neighboring threads then store neighboring elements
  const int64_t lead = aligned ? 0 : side.width - 1;
  side.slots = Divisor(divide_up(length + lead, side.width));
  return side;
}

/// Returns the lengths of a tile along axis 0 and along `axis` of the nest. A tile has at most 16 KiB of the larger
/// type; small copies use smaller tiles, so that there are enough CTAs for all SMs.
template <class To, class From>
std::array<int64_t, 2> choose_transpose_tile(const Nest<2>& nest, int axis) {
  constexpr int64_t width = 16 / std::min(sizeof(To), sizeof(From));
  constexpr int64_t max_elements = 16384 / static_cast<int64_t>(std::max(sizeof(To), sizeof(From)));
  int64_t elements = max_elements;
  while (elements > 1024 && nest.numel() < 512 * elements) elements /= 2;
  int64_t edge = 32;
  while (4 * edge * edge <= elements) edge *= 2;
  const int64_t a = nest.size[0];
  const int64_t b = nest.size[axis];
  const int64_t tile_a = tile_length(a, std::max(a <= 2 * edge ? a : edge, elements / b), width);
  return {tile_a, tile_length(b, elements / tile_a, width)};
}

/// Launches transpose_kernel for a nest of fewer than 2^31 elements.
template <class To, class From, class Map>
void launch_transpose(To* out, const From* in, const Nest<2>& nest, int axis, const Map& map, cudaStream_t stream) {
  constexpr int64_t item = std::min(sizeof(To), sizeof(From));  // bytes of an element in shared memory
  constexpr int64_t width = 16 / item;
  const Nest<2> outer = nest.without(axis).without(0);
  const auto tile = choose_transpose_tile<To, From>(nest, axis);
  const int64_t size[] = {nest.size[0], nest.size[axis]};

  Transpose p{in, out, {}, {}, {}, {}, 0, {}, 0, 0, Offsets<2>(outer)};
  p.from = tile_side(in, nest, 1, axis, 0, tile[1], tile[0]);
  p.to = tile_side(out, nest, 0, 0, axis, tile[0], tile[1]);
  int64_t tiles = outer.numel();
  for (size_t i = 0; i < 2; ++i) {
    const int64_t parts = divide_up(size[i], tile[i]);
    p.size[i] = static_cast<uint32_t>(size[i]);
    p.tile[i] = static_cast<uint32_t>(tile[i]);
    p.parts[i] = Divisor(parts);
    tiles *= parts;
  }
  p.tiles = static_cast<uint32_t>(tiles);
  const bool vectors = !p.from.joined && (tile[1] % width == 0 || tile[1] >= 4 * width);
  p.pitch = static_cast<uint32_t>(vectors ? round_up(tile[1], width) : tile[1] | 1);
  p.skew = vectors ? width : 0;
  const int64_t shared = item * (tile[0] * p.pitch + tile[0] / kVectorWidth<To> * p.skew);
  const auto threads = static_cast<int>(std::clamp<int64_t>(round_up(tile[0] * tile[1] / 8, 32), 64, kBlock));
  launch_kernel("copy", transpose_kernel<To, From, Map>, grid_size(tiles, 1), threads, static_cast<int>(shared), stream,
                p, map);
}

/// Copies `in` to `out`, converted to To. `nest` is the nest of (out, in), and `axis` is its transposed_axis(). `map`
/// converts an element to SharedElement (see transpose_kernel).
template <class To, class From, class Map = ConvertElement<SharedElement<To, From>>>
void transpose(const View& out, const View& in, const Nest<2>& nest, int axis, const Map& map = {}) {
  const Launch launch(out);
  for_each_part(nest, [&](const Nest<2>& part, const std::array<int64_t, 2>& base) {
    launch_transpose(out.as<To>() + base[0], in.as<From>() + base[1], part, axis, map, launch.stream);
  });
}

/// Returns the axis of the nest of (out, in) along which `in` is contiguous if `out` is contiguous along axis 0.
/// Returns 0 if there is no such axis, if `in` is broadcast or contiguous along axis 0, or if the two axes have too few
/// elements to pay for a transposition.
inline int transposed_axis(const Nest<2>& nest) {
  constexpr int64_t kMinElements = 512;
  const int64_t step = nest.stride[0][1];
  if (nest.numel() == 0 || nest.stride[0][0] != 1 || step == 0 || step == 1) return 0;
  for (int axis = 1; axis < nest.rank; ++axis)
    if (nest.stride[axis][1] == 1 && nest.size[0] * nest.size[axis] >= kMinElements) return axis;
  return 0;
}

}  // namespace voxgrad::cuda
