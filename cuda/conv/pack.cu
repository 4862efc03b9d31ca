// Convolution weights in the order in which the gathers on tensor cores multiply them,
//   (group, column tile, class of taps, chunk of channels, tap of the class, ...),
// so that a block reads them from one end to the other. What follows is
//   (block of 8 columns, lane, its words) for gather_mma.cuh,
//   (part, slab as in wgmma.cuh) for gather_wgmma.cuh, where `slots` classes count as one.
// Channels beyond the last are zero.
#include "cuda/conv/pack.h"

namespace voxgrad::cuda {
namespace {

template <class Arithmetic>
__global__ void pack_kernel(const __grid_constant__ PackWeights p, uint32_t* packed, int64_t fragments) {
  using Element = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kParts = Arithmetic::kParts;
  const Element* const weight = static_cast<const Element*>(p.weight);
  for (int64_t i = thread_index(); i < fragments; i += thread_count()) {
    int64_t index = i;
    const auto digit = [&](int base) {
      const int d = static_cast<int>(index % base);
      index /= base;
      return d;
    };
    const int lane = digit(32), block = digit(p.columns / 8);
    int of_tile = digit(p.chunks * p.taps);  // (class, chunk, tap of the class)
    const int tile = digit(p.column_tiles);
    int part[3];
    const auto taps_of = [&](int number) {  // and the class's parts
      int taps = 1;
      for (int a = 2; a >= 0; --a) {
        part[a] = number % p.axis[a].parts;
        number /= p.axis[a].parts;
        taps *= p.axis[a].part[part[a]].taps;
      }
      return taps;
    };
    int number = 0, taps;
    for (;; number += p.slots) {
      taps = 0;
      for (int slot = 0; slot < p.slots; ++slot) taps += taps_of(number + slot);
      if (of_tile < p.chunks * taps) break;
      of_tile -= p.chunks * taps;
    }
    const int chunk = of_tile / taps;
    int in_class = of_tile % taps;
    for (int of_class = taps_of(number); in_class >= of_class; of_class = taps_of(++number)) in_class -= of_class;
    int64_t tap = 0;
    for (int a = 2; a >= 0; --a) {
      const AxisPart& at = p.axis[a].part[part[a]];
      tap += (at.tap_first + in_class % at.taps * int64_t{at.tap_step}) * p.tap_stride[a];
      in_class /= at.taps;
    }
    const int column = tile * p.columns + block * 8 + lane / 4;
    const Element* const from = weight + index * p.group_stride + column * p.out_stride + tap;
    for (int half = 0; half < 2; ++half) {
      const int word = chunk * 8 + lane % 4 + half * 4;
      Element x[kElements];
      for (int e = 0; e < kElements; ++e) {
        const int channel = word * kElements + e;
        x[e] = channel < p.in_channels && column < p.out_channels ? from[channel * p.in_stride] : Element(0.0f);
      }
      uint32_t parts[kParts];
      Arithmetic::split(x, parts);
      const int64_t of_tap = i / (p.columns * 4) * p.columns * 8 * kParts;
      for (int part = 0; part < kParts; ++part)
        packed[p.wgmma ? of_tap + part * p.columns * 8 + block * 64 + lane / 4 * 8 + (half ^ lane / 16) * 4 + lane % 4
                       : (i * kParts + part) * 2 + half] = parts[part];
    }
  }
}

}  // namespace

template <class Arithmetic>
size_t packed_bytes(const PackWeights& p) {
  return static_cast<size_t>(p.groups) * p.column_tiles * p.chunks * p.taps * p.columns * 8 * Arithmetic::kParts *
         sizeof(uint32_t);
}

template <class Arithmetic>
void pack_weights(const PackWeights& p, void* packed, cudaStream_t stream) {
  const int64_t fragments = static_cast<int64_t>(packed_bytes<Arithmetic>(p) / (8 * Arithmetic::kParts));
  pack_kernel<Arithmetic><<<grid_size(fragments), kBlock, 0, stream>>>(p, static_cast<uint32_t*>(packed), fragments);
}

template size_t packed_bytes<Tf32>(const PackWeights&);
template size_t packed_bytes<Tf32x3>(const PackWeights&);
template size_t packed_bytes<Bf16>(const PackWeights&);
template size_t packed_bytes<F16>(const PackWeights&);
template void pack_weights<Tf32>(const PackWeights&, void*, cudaStream_t);
template void pack_weights<Tf32x3>(const PackWeights&, void*, cudaStream_t);
template void pack_weights<Bf16>(const PackWeights&, void*, cudaStream_t);
template void pack_weights<F16>(const PackWeights&, void*, cudaStream_t);

}  // namespace voxgrad::cuda
