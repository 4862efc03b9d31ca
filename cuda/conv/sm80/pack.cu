// Packs the weights in the order in which fprop_dgrad.cuh reads them:
//   (group, column tile, class of taps, k-block, tap of the class, block of 8 columns, lane, words of the lane).
// The weights of a CTA are then contiguous. Channels after the last channel are zero.
#include "cuda/conv/sm80/pack.h"

#include "cuda/conv/common/arithmetic.cuh"

namespace voxgrad::cuda {
namespace {

/// Packs the weights. A fragment is the words of one lane in one block of 8 columns. Launch: one thread per fragment in
/// a 1-D grid-stride loop, kBlock threads per CTA. No shared memory.
template <class Arithmetic>
__global__ void pack_weights_kernel(const __grid_constant__ PackWeights p, uint32_t* packed, int64_t fragments) {
  using Element = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kParts = Arithmetic::kParts;
  const Element* const weight = static_cast<const Element*>(p.weight);
  for (int64_t i = thread_index(); i < fragments; i += thread_count()) {
    int64_t group = i;
    const auto digit = [&](int base) {
      const int d = static_cast<int>(group % base);
      group /= base;
      return d;
    };
    const int lane = digit(32), block = digit(p.columns / 8);
    int of_tile = digit(p.k_blocks * p.taps);  // (class, k-block, tap of the class)
    const int column = digit(p.column_tiles) * p.columns + block * 8 + lane / 4;
    int part[3];
    // Returns the taps of a class, and sets `part` to the phase of the class along each axis.
    const auto taps_of = [&](int number) {
      int taps = 1;
      for (int a = 2; a >= 0; --a) {
        part[a] = number % p.axis[a].phases;
        number /= p.axis[a].phases;
        taps *= p.axis[a].phase[part[a]].taps;
      }
      return taps;
    };
    int number = 0, taps = taps_of(0);
    for (; of_tile >= p.k_blocks * taps; taps = taps_of(++number)) of_tile -= p.k_blocks * taps;
    const int k_block = of_tile / taps;
    int of_class = of_tile % taps;
    int64_t tap = 0;
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& at = p.axis[a].phase[part[a]];
      tap += (at.tap_first + of_class % at.taps * int64_t{at.tap_step}) * p.tap_stride[a];
      of_class /= at.taps;
    }
    const Element* const from = weight + group * p.group_stride + column * p.out_stride + tap;
    for (int half = 0; half < 2; ++half) {
      const int word = k_block * 8 + lane % 4 + half * 4;
      Element x[kElements];
      for (int e = 0; e < kElements; ++e) {
        const int channel = word * kElements + e;
        x[e] = channel < p.in_channels && column < p.out_channels ? from[channel * p.in_stride] : Element(0.0f);
      }
      uint32_t parts[kParts];
      Arithmetic::split(x, parts);
      for (int k = 0; k < kParts; ++k) packed[(i * kParts + k) * 2 + half] = parts[k];
    }
  }
}

}  // namespace

void pack_weights(const PackWeights& p, ConvArithmetic arithmetic, void* packed, cudaStream_t stream) {
  const int64_t fragments = int64_t{p.groups} * p.column_tiles * p.k_blocks * p.taps * p.columns * 4;
  with_arithmetic(arithmetic, [&]<class Arithmetic>() {
    pack_weights_kernel<Arithmetic>
        <<<grid_size(fragments), kBlock, 0, stream>>>(p, static_cast<uint32_t*>(packed), fragments);
  });
  check_launch("conv: packing of weights");
}

}  // namespace voxgrad::cuda
