// The order of the elements along an axis.
//
// Short lines, such as those along classes: every element counts those that come before it. Longer ones: CUB's radix
// sort, which is stable, sorts the positions in all lines at once, first by their elements and then by their lines.
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Bits whose order as unsigned integers is that of the elements: NaN last, both zeros alike.
template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
__device__ KeyOf<T> key_of(T element, bool descending) {
  using Key = KeyOf<T>;
  constexpr Key sign = Key(1) << (8 * sizeof(Key) - 1);
  Key key;
  if constexpr (std::is_integral_v<T>) {
    key = static_cast<Key>(element) ^ sign;
  } else {
    const compute_t<T> x = element;
    key = std::bit_cast<Key>(x + 0);  // -0 + 0 is 0
    key = is_nan(x) ? ~Key(0) : key & sign ? ~key : key | sign;
  }
  return descending ? ~key : key;
}

/// One line: its place in the views, and the steps along them.
struct Line {
  int64_t in_step, out_step;
  int length, wanted;
};

/// Views in and out with the axis held.
template <class T>
__global__ void __launch_bounds__(kBlock)
    rank_elements(int64_t* out, const T* in, Line line, bool descending, uint32_t lines, Offsets<2> offsets) {
  const int64_t count = int64_t{lines} * line.length;
  for (int64_t e = thread_index(); e < count; e += thread_count()) {
    const int mine = static_cast<int>(e / lines);
    int64_t at[2];
    offsets.at(static_cast<uint32_t>(e - int64_t{mine} * lines), at);
    const auto key = [&](int i) { return key_of(in[at[0] + i * line.in_step], descending); };
    const KeyOf<T> own = key(mine);
    int rank = 0;
    for (int i = 0; i < line.length; ++i) {
      const KeyOf<T> other = key(i);
      rank += other < own || (other == own && i < mine);
    }
    if (rank < line.wanted) out[at[1] + rank * line.out_step] = mine;
  }
}

template <class T>
void sort_short(const View& index, const View& in, int axis, bool descending, const Launch& launch) {
  View in_lines = in, out_lines = index;
  in_lines.size[axis] = out_lines.size[axis] = 1;
  const Line line{in.stride[axis], index.stride[axis], static_cast<int>(in.size[axis]),
                  static_cast<int>(index.size[axis])};
  for_each_part(make_nest<2>({in_lines, out_lines}), [&](const Nest<2>& part, const std::array<int64_t, 2>& base) {
    const auto lines = static_cast<uint32_t>(part.numel());
    rank_elements<<<grid_size(int64_t{lines} * line.length), kBlock, 0, launch.stream>>>(
        index.as<int64_t>() + base[1], in.as<const T>() + base[0], line, descending, lines, Offsets<2>(part));
    check_launch("sort");
  });
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    make_keys(KeyOf<T>* keys, uint32_t* positions, const T* in, bool descending, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    keys[i] = key_of(in[i], descending);
    positions[i] = static_cast<uint32_t>(i);
  }
}

/// The line of each position, or where it is in its line.
__global__ void __launch_bounds__(kBlock)
    divide_positions(uint32_t* out, const uint32_t* positions, Divider length, bool remainder, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const uint32_t position = positions[i], line = length.divide(position);
    out[i] = remainder ? position - line * length.divisor : line;
  }
}

/// Sorts `keys` and `values` with them, by the low `bits` of the keys.
template <class Key>
void sort_pairs(cub::DoubleBuffer<Key>& keys, cub::DoubleBuffer<uint32_t>& values, int64_t count, int bits,
                const Launch& launch) {
  size_t bytes = 0;
  const auto run = [&](void* memory) {
    check_cuda(
        cub::DeviceRadixSort::SortPairs(memory, bytes, keys, values, static_cast<int>(count), 0, bits, launch.stream),
        "sort");
  };
  run(nullptr);
  const Workspace memory(launch, bytes);
  run(memory.as<void>());
}

/// `view` with `axis` moved behind the others.
View with_axis_last(View view, int axis) {
  std::rotate(view.size + axis, view.size + axis + 1, view.size + view.rank);
  std::rotate(view.stride + axis, view.stride + axis + 1, view.stride + view.rank);
  return view;
}

/// The axis is the last.
template <class T>
void sort_long(const View& index, const View& in, bool descending, const Launch& launch) {
  using Key = KeyOf<T>;
  const int64_t count = in.numel(), length = in.size[in.rank - 1], lines = count / length;
  check(count < int64_t{1} << 31, "sort", "CUDA sorts less than 2^31 elements at a time, got ", count);
  const auto items = static_cast<size_t>(count);
  const Workspace key_memory(launch, 2 * items * sizeof(Key)), position_memory(launch, 2 * items * sizeof(uint32_t));
  Key* const key = key_memory.as<Key>();
  uint32_t* const position = position_memory.as<uint32_t>();
  const unsigned grid = grid_size(count);

  const View dense = dense_like(in, key + count, in.dtype);
  copy(dense, in);
  make_keys<<<grid, kBlock, 0, launch.stream>>>(key, position, dense.as<const T>(), descending, count);
  check_launch("sort");
  cub::DoubleBuffer<Key> keys(key, key + count);
  cub::DoubleBuffer<uint32_t> positions(position, position + count);
  sort_pairs(keys, positions, count, 8 * sizeof(Key), launch);
  if (lines > 1) {
    cub::DoubleBuffer<uint32_t> of_line(key_memory.as<uint32_t>(), key_memory.as<uint32_t>() + count);
    divide_positions<<<grid, kBlock, 0, launch.stream>>>(of_line.Current(), positions.Current(), Divider(length), false,
                                                         count);
    check_launch("sort");
    sort_pairs(of_line, positions, count, std::bit_width(static_cast<uint64_t>(lines - 1)), launch);
  }
  divide_positions<<<grid, kBlock, 0, launch.stream>>>(positions.Current(), positions.Current(), Divider(length), true,
                                                       count);
  check_launch("sort");
  View first = dense_like(in, positions.Current(), i32);
  first.size[first.rank - 1] = index.size[index.rank - 1];
  copy(index, first);
}

}  // namespace

void sort(const View& index, const View& in, int axis, bool descending) {
  if (index.numel() == 0) return;
  constexpr int64_t kShort = 32;
  const Launch launch(index);
  View bytes = in;  // bool has the order of its bytes
  if (in.dtype == b8) bytes.dtype = u8;
  dispatch_cuda(Numbers(), bytes.dtype, "sort", [&]<class T>() {
    if (bytes.size[axis] <= kShort) return sort_short<T>(index, bytes, axis, descending, launch);
    sort_long<T>(with_axis_last(index, axis), with_axis_last(bytes, axis), descending, launch);
  });
}

}  // namespace voxgrad::cuda::kernel
