// Convolution weights in the order in which the lanes of conv_gather_mma.cuh multiply them:
//   (group, column tile, class of taps, chunk of channels, tap of the class, block of 8 columns, lane, its words),
// so that a block reads them from one end to the other. Channels beyond the last are zero.
#include "cuda/conv_pack.h"

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
    int part[3], taps = 1;
    for (int c = 0;; ++c) {
      int number = c;
      taps = 1;
      for (int a = 2; a >= 0; --a) {
        part[a] = number % p.axis[a].parts;
        number /= p.axis[a].parts;
        taps *= p.axis[a].part[part[a]].taps;
      }
      if (of_tile < p.chunks * taps) break;
      of_tile -= p.chunks * taps;
    }
    const int chunk = of_tile / taps;
    int in_class = of_tile % taps;
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
      for (int part = 0; part < kParts; ++part) packed[(i * kParts + part) * 2 + half] = parts[part];
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
