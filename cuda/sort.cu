// Stable sort along an axis with CUB's radix sort. All lines along the axis are sorted at once: a first sort orders the
// positions of all elements by value, and a second, stable sort orders these positions by line.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Sorts pairs of keys and values by the low `bits` bits of the keys.
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

/// Returns `view` with `axis` moved to the end.
View with_axis_last(View view, int axis) {
  std::rotate(view.size + axis, view.size + axis + 1, view.size + view.rank);
  std::rotate(view.stride + axis, view.stride + axis + 1, view.stride + view.rank);
  return view;
}

/// Sorts the lines of `in` along the last axis and writes the positions in sorted order to `index`. Writes only the
/// first positions if the lines of `index` are shorter.
template <class T>
void sort_lines(const View& index, const View& in, bool descending, const Launch& launch) {
  using Key = SortKey<T>;
  const int64_t count = in.numel();
  const int64_t length = in.size[in.rank - 1];
  const int64_t lines = count / length;
  check(count < int64_t{1} << 31, "sort", "CUDA sorts fewer than 2^31 elements, got ", count);
  const auto items = static_cast<size_t>(count);
  const Workspace key_memory(launch, 2 * items * sizeof(Key)), position_memory(launch, 2 * items * sizeof(uint32_t));
  cub::DoubleBuffer<Key> keys(key_memory.as<Key>(), key_memory.as<Key>() + count);
  cub::DoubleBuffer<uint32_t> positions(position_memory.as<uint32_t>(), position_memory.as<uint32_t>() + count);
  const auto dense = [&](void* data) { return dense_like(in, data, i32); };
  const Divisor line(length);

  map<Key, T>(
      "sort", [=] __device__(T x) { return sort_key(x, descending); }, dense(keys.Current()), in);
  arange(dense(positions.Current()), 0, 1);
  sort_pairs(keys, positions, count, 8 * sizeof(Key), launch);
  if (lines > 1) {
    cub::DoubleBuffer<uint32_t> line_keys(key_memory.as<uint32_t>(), key_memory.as<uint32_t>() + count);
    map<uint32_t, uint32_t>(
        "sort", [=] __device__(uint32_t i) { return line.divide(i); }, dense(line_keys.Current()),
        dense(positions.Current()));
    sort_pairs(line_keys, positions, count, std::bit_width(static_cast<uint64_t>(lines - 1)), launch);
  }
  View first = dense(positions.Current());
  first.size[first.rank - 1] = index.size[index.rank - 1];
  map<int64_t, uint32_t>(
      "sort", [=] __device__(uint32_t i) { return line.take_digit(i); }, index, first);
}

}  // namespace

void sort(const View& index, const View& in, int axis, bool descending) {
  if (index.numel() == 0) return;
  const Launch launch(index);
  View bytes = in;  // sort bool as bytes, which have the same order
  if (in.dtype == b8) bytes.dtype = u8;
  dispatch_cuda(Numbers(), bytes.dtype, "sort", [&]<class T>() {
    sort_lines<T>(with_axis_last(index, axis), with_axis_last(bytes, axis), descending, launch);
  });
}

}  // namespace voxgrad::cuda::kernel
