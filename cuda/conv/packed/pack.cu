// Weights in the order in which the implicit GEMMs multiply them,
//   (group, column tile, class of taps, k-block, tap of the class, ...),
// so that a CTA reads them from one end to the other. What follows is
//   (block of 8 columns, lane, its words) for mma_sync/fprop_dgrad.cuh,
//   (high or low, slab as in wgmma.cuh) for packed/fprop_dgrad.cuh, where the classes of `tile_phases` phases take
//   turns every `stage_k_blocks` k-blocks.
// Channels beyond the last are zero.
//
// Inputs, for packed/fprop_dgrad.cuh and, of halves, packed/wgrad.cuh, rounded or split into high and low, as
//   (sample, group, k-block, high or low, half of the k-block, residue along the width, voxel, 4 words).
#include "cuda/conv/packed/pack.h"

#include <algorithm>

#include "cuda/conv/plan_common.h"

namespace voxgrad::cuda {
namespace {

template <class Arithmetic>
__global__ void pack_weights_kernel(const __grid_constant__ PackWeights p, uint32_t* packed, int64_t fragments) {
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
    const int product = p.columns * p.slide, lane = digit(32), block = digit(product / 8);
    int of_tile =
        digit(p.k_blocks * p.taps);  // (classes, stage of `stage_k_blocks` k-blocks, class, k-block, tap of the class)
    const int tile = digit(p.column_tiles);
    int part[3];
    const auto taps_of = [&](int number) {  // and the class's parts
      int taps = 1;
      for (int a = 2; a >= 0; --a) {
        part[a] = number % p.axis[a].phases;
        number /= p.axis[a].phases;
        taps *= p.axis[a].phase[part[a]].taps;
      }
      return taps;
    };
    int number = 0, taps;
    for (;; number += p.tile_phases) {
      taps = 0;
      for (int tile_phase = 0; tile_phase < p.tile_phases; ++tile_phase) taps += taps_of(number + tile_phase);
      if (of_tile < p.k_blocks * taps) break;
      of_tile -= p.k_blocks * taps;
    }
    const int step = of_tile / (taps * p.stage_k_blocks);
    int in_class = of_tile % (taps * p.stage_k_blocks), of_class = taps_of(number);
    for (; in_class >= of_class * p.stage_k_blocks; of_class = taps_of(++number))
      in_class -= of_class * p.stage_k_blocks;
    const int k_block = step * p.stage_k_blocks + in_class / of_class;
    in_class %= of_class;
    int64_t tap = 0;
    for (int a = 2; a >= 0; --a) {
      const AxisPhase& at = p.axis[a].phase[part[a]];
      tap += (at.tap_first + in_class % at.taps * int64_t{at.tap_step}) * p.tap_stride[a];
      in_class /= at.taps;
    }
    int column = block * 8 + lane / 4;
    const int beside = column / p.columns;  // the tap along depth
    if (p.slide > 1) tap += beside * int64_t{p.axis[0].phase[0].tap_step} * p.tap_stride[0];
    column += (tile - beside) * p.columns;
    const Element* const from = weight + index * p.group_stride + column * p.out_stride + tap;
    for (int half = 0; half < 2; ++half) {
      const int word = k_block * 8 + lane % 4 + half * 4;
      Element x[kElements];
      for (int e = 0; e < kElements; ++e) {
        const int channel = word * kElements + e;
        x[e] = channel < p.in_channels && column < p.out_channels ? from[channel * p.in_stride] : Element(0.0f);
      }
      uint32_t parts[kParts];
      Arithmetic::split(x, parts);
      const int64_t of_tap = i / (product * 4) * product * 8 * kParts;
      for (int part = 0; part < kParts; ++part)
        packed[p.wgmma ? of_tap + part * product * 8 + block * 64 + lane / 4 * 8 + (half ^ lane / 16) * 4 + lane % 4
                       : (i * kParts + part) * 2 + half] = parts[part];
    }
  }
}

constexpr int kPackedVoxels = 4;  // of a thread at a time: loads that are on their way together

template <class Arithmetic>
__global__ void __launch_bounds__(kBlock) pack_inputs_kernel(const __grid_constant__ PackInputs p, uint4* packed) {
  if (p.counter && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.counter = 0;
  using Element = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kParts = Arithmetic::kParts;
  const int rows = p.size[0] * p.size[1], voxels = rows * p.line.value;
  const int64_t planes = p.batch * p.groups * p.k_blocks * 2;
  const bool whole = p.step[0].value * p.step[1].value * p.step[2].value == 1;
  const bool dense = p.stride[4] == 1 && p.stride[3] == p.size[2] && p.stride[2] == int64_t{p.size[2]} * p.size[1];
  for (int64_t plane = blockIdx.y; plane < planes; plane += gridDim.y) {
    const int64_t of_sample = plane / 2 / p.k_blocks;
    const int half = static_cast<int>(plane % 2);
    const int first = (static_cast<int>(plane / 2 % p.k_blocks) * 2 + half) * 4 * kElements;  // channel of the group
    const int real = p.channels - first;
    const Element* const from = static_cast<const Element*>(p.in) + of_sample / p.groups * p.stride[0] +
                                (of_sample % p.groups * p.channels + first) * p.stride[1];
    uint4* const to = packed + (plane / 2 * kParts * 2 + half) * voxels;
    for (int first_voxel = static_cast<int>(blockIdx.x) * kPackedVoxels * kBlock; first_voxel < voxels;
         first_voxel += static_cast<int>(gridDim.x) * kPackedVoxels * kBlock) {
      Element x[kPackedVoxels][4][kElements];
      bool wanted[kPackedVoxels];
      int at[kPackedVoxels];
#pragma unroll
      for (int j = 0; j < kPackedVoxels; ++j) {
        const int v = first_voxel + j * kBlock + static_cast<int>(threadIdx.x);
        wanted[j] = v < voxels;
        at[j] = v;
        bool inside = wanted[j];
        int64_t offset = v;
        if (!whole || !dense) {
          int row = v, position[3], residue[3];
          position[2] = p.line.take(row);
          position[0] = row;
          position[1] = p.lines.take(position[0]);
          inside &= position[2] < p.size[2];
          offset = 0;
          for (int a = 0; a < 3; ++a) {
            offset += position[a] * p.stride[a + 2];
            residue[a] = p.step[a].take(position[a]);
            wanted[j] &= (p.is_read[a] >> residue[a] & 1) != 0;
          }
          inside &= wanted[j];
          at[j] = (residue[2] * rows + row) * p.run + position[2];
        }
#pragma unroll
        for (int c = 0; c < 4 * kElements; ++c)
          x[j][c / kElements][c % kElements] = inside && c < real ? from[c * p.stride[1] + offset] : Element(0.0f);
      }
#pragma unroll
      for (int j = 0; j < kPackedVoxels; ++j) {
        uint32_t word[kParts][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t parts[kParts];
          Arithmetic::split(x[j][i], parts);
#pragma unroll
          for (int part = 0; part < kParts; ++part) word[part][i] = parts[part];
        }
        if (wanted[j])
#pragma unroll
          for (int part = 0; part < kParts; ++part)
            to[int64_t{part * 2} * voxels + at[j]] =
                make_uint4(word[part][0], word[part][1], word[part][2], word[part][3]);
      }
    }
  }
}

/// Of a plane, in all residues.
int64_t packed_voxels(const PackInputs& p) { return int64_t{p.size[0]} * p.lines.value * p.line.value; }

}  // namespace

template <class Arithmetic>
size_t packed_bytes(const PackWeights& p) {
  return size_t{sizeof(uint32_t)} * p.groups * p.column_tiles * p.k_blocks * p.taps * p.columns * p.slide * 8 *
         Arithmetic::kParts;
}

template <class Arithmetic>
void pack_weights(const PackWeights& p, void* packed, cudaStream_t stream) {
  const int64_t fragments = static_cast<int64_t>(packed_bytes<Arithmetic>(p) / (8 * Arithmetic::kParts));
  pack_weights_kernel<Arithmetic>
      <<<grid_size(fragments), kBlock, 0, stream>>>(p, static_cast<uint32_t*>(packed), fragments);
}

PackInputs pack_inputs_of(const ConvProblem& problem, const View& in) {
  const ConvGeometry& g = problem.geometry;
  PackInputs p{};
  p.in = in.data;
  std::copy_n(in.stride, 5, p.stride);
  p.batch = problem.batch;
  p.groups = static_cast<int>(problem.groups);
  p.channels = static_cast<int>(problem.in_channels);
  p.k_blocks = divide_up(p.channels, 8 * elements_of(problem));
  for (int a = 0; a < 3; ++a) {
    p.size[a] = static_cast<int>(read_size(problem, a));
    const int64_t stride = read_step(problem, a), step = stride <= kMostSplits ? stride : 1;  // the mask has 32 bits
    p.step[a] = Divisor(static_cast<int>(step));
    for (int64_t tap = 0; tap < problem.kernel[a]; ++tap)
      p.is_read[a] |= 1u << ((tap * g.dilation[a] - g.padding[a]) % step + step) % step;
  }
  p.run = divide_up(p.size[2], p.step[2].value);
  p.lines = Divisor(p.size[1]);
  p.line = Divisor(p.run * p.step[2].value);
  return p;
}

template <class Arithmetic>
size_t packed_bytes(const PackInputs& p) {
  return size_t{sizeof(uint4)} * 2 * Arithmetic::kParts * p.k_blocks * p.groups * packed_voxels(p);
}

template <class Arithmetic>
void pack_inputs(const PackInputs& p, void* packed, cudaStream_t stream) {
  constexpr int64_t kMostPlanes = 65535;
  const int64_t planes = p.batch * p.groups * p.k_blocks * 2, voxels = packed_voxels(p);
  const dim3 grid(grid_size(voxels, kPackedVoxels * kBlock), static_cast<unsigned>(std::min(planes, kMostPlanes)));
  pack_inputs_kernel<Arithmetic><<<grid, kBlock, 0, stream>>>(p, static_cast<uint4*>(packed));
}

template size_t packed_bytes<Tf32>(const PackWeights&);
template size_t packed_bytes<Tf32x3>(const PackWeights&);
template size_t packed_bytes<Bf16>(const PackWeights&);
template size_t packed_bytes<F16>(const PackWeights&);
template void pack_weights<Tf32>(const PackWeights&, void*, cudaStream_t);
template size_t packed_bytes<Tf32>(const PackInputs&);
template void pack_inputs<Tf32>(const PackInputs&, void*, cudaStream_t);
template void pack_weights<Tf32x3>(const PackWeights&, void*, cudaStream_t);
template size_t packed_bytes<Tf32x3>(const PackInputs&);
template void pack_inputs<Tf32x3>(const PackInputs&, void*, cudaStream_t);
template void pack_weights<Bf16>(const PackWeights&, void*, cudaStream_t);
template size_t packed_bytes<Bf16>(const PackInputs&);
template void pack_inputs<Bf16>(const PackInputs&, void*, cudaStream_t);
template void pack_weights<F16>(const PackWeights&, void*, cudaStream_t);
template size_t packed_bytes<F16>(const PackInputs&);
template void pack_inputs<F16>(const PackInputs&, void*, cudaStream_t);

}  // namespace voxgrad::cuda
