// Kernel selection and launch of elementwise maps, compiled once for all operators.
#include "cuda/map.cuh"

namespace voxgrad::cuda {
namespace {

/// Returns the number of elements before the first position at which all views are aligned to vectors, or `count` if
/// there is no such position.
template <size_t N>
int64_t unaligned_head(const MapKernels<N>& kernels, const std::array<View, N>& views, int64_t count) {
  const auto head_of = [&](size_t k) {
    const auto address = reinterpret_cast<uintptr_t>(views[k].data);
    const auto width = static_cast<uintptr_t>(kernels.width);
    return (width - address / static_cast<uintptr_t>(kernels.item[k]) % width) % width;
  };
  for (size_t k = 1; k < N; ++k)
    if (head_of(k) != head_of(0)) return count;
  return std::min<int64_t>(static_cast<int64_t>(head_of(0)), count);
}

template <size_t N>
Pointers<N - 1> pointers(const MapKernels<N>& kernels, const std::array<View, N>& views,
                         const std::array<int64_t, N>& base) {
  Pointers<N - 1> p{};
  const auto address = [&](size_t k) { return static_cast<char*>(views[k].data) + base[k] * kernels.item[k]; };
  p.out = address(0);
  for (size_t k = 1; k < N; ++k) p.in[k - 1] = address(k);
  return p;
}

template <class... Parameters>
void launch(const char* op, const void* kernel, int64_t threads, cudaStream_t stream, const void* f,
            Parameters... parameters) {
  void* arguments[] = {const_cast<void*>(f), &parameters...};
  launch_kernel(op, kernel, grid_size(threads), kBlock, 0, stream, arguments);
}

}  // namespace

template <size_t N>
void launch_map(const char* op, const MapKernels<N>& kernels, const void* f, const std::array<View, N>& views) {
  const int64_t count = views[0].numel();
  if (count == 0) return;
  const Launch on(views[0]);
  const Nest<N> nest = make_nest<N>(views);
  if (nest.contiguous()) {
    const int64_t head = unaligned_head(kernels, views, count);
    const int64_t vectors = (count - head) / kernels.width;
    const int64_t scalars = count - vectors * kernels.width;
    return launch(op, kernels.contiguous, std::max(vectors, scalars), on.stream, f, pointers(kernels, views, {}), count,
                  head, vectors);
  }
  for_each_part(nest, [&](const Nest<N>& part, const std::array<int64_t, N>& base) {
    const Pointers<N - 1> p = pointers(kernels, views, base);
    const auto elements = static_cast<uint32_t>(part.numel());
    if (kernels.rows && Rows<N>::supports(part)) {
      const Rows<N> rows(part, static_cast<int>(kernels.width));
      const uint32_t slots = elements / rows.length * static_cast<uint32_t>(rows.slots.value());
      return launch(op, kernels.rows, slots, on.stream, f, p, slots, rows);
    }
    launch(op, kernels.strided, elements, on.stream, f, p, elements, Offsets<N>(part));
  });
}

template void launch_map(const char*, const MapKernels<1>&, const void*, const std::array<View, 1>&);
template void launch_map(const char*, const MapKernels<2>&, const void*, const std::array<View, 2>&);
template void launch_map(const char*, const MapKernels<3>&, const void*, const std::array<View, 3>&);
template void launch_map(const char*, const MapKernels<4>&, const void*, const std::array<View, 4>&);

}  // namespace voxgrad::cuda
