// What both gathers on tensor cores (gather_mma.cuh, gather_wgmma.cuh) are made of: what a kernel is told,
// where a block is, how inputs are staged and results written.
#pragma once

#include <algorithm>

#include "cuda/conv/instances.h"
#include "cuda/conv/mma.cuh"
#include "cuda/conv/parts.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"

namespace voxgrad::cuda {

/// Words of input channels that are staged at a time.
inline constexpr int kChunk = 8;
inline constexpr int kMaxTaps = 1024, kMaxClasses = 64;
/// The offset of a voxel that is not there.
inline constexpr uint32_t kOutside = UINT32_MAX;

/// What the kernel is told. A class is a part of an axis for each axis: of the results (transposed, where a block has
/// one class, or `slots` of them), or of the inputs (forward, where it has them all).
struct GatherMma {
  const void* in;
  const uint4* weights;  // packed
  const void* bias;      // or null
  void* out;
  int64_t in_stride[5], out_stride[5], bias_stride;
  int64_t batch;
  int in_channels, out_channels;  // of a group
  int groups, column_tiles, chunks;
  bool transposed, relu;
  Divisor box[3], extent[3];            // of results; of the halo
  int box_voxels, halo_voxels, rounds;  // rounds: voxels that a thread stages at most
  int line, pitch;                      // words from a staged line to the next, and from a word of channels
  int tiles[3], classes, slots;
  bool merged;  // a block takes all phases and columns of its box; one halo, all of whose chunks are staged at once
  int buffers;  // staged chunks
  AxisParts axis[3];
  int class_begin[kMaxClasses + 1];  // the first of a class's taps
  int tap_offset[kMaxTaps];          // bytes from the corner of the staged halo to what the tap reads
};

/// Where a block is: its tile of the results.
struct GatherPlace {
  int64_t sample;
  int group, column_tile, phase;
  int q[3];  // the box's corner
};

__device__ inline GatherPlace gather_place(const GatherMma& p) {
  GatherPlace place;
  unsigned index = blockIdx.x;
  const auto digit = [&](unsigned base) {
    const unsigned d = index % base;
    index /= base;
    return static_cast<int>(d);
  };
  place.column_tile = p.merged ? 0 : digit(p.column_tiles);
  place.phase = p.transposed && !p.merged ? digit(p.classes / p.slots) * p.slots : 0;
  for (int a = 2; a >= 0; --a) place.q[a] = digit(p.tiles[a]) * p.box[a].value;
  place.group = digit(p.groups);
  place.sample = index;
  return place;
}

__device__ inline void class_parts(const GatherMma& p, int number, int (&part)[3]) {
  for (int a = 2; a >= 0; --a) {
    part[a] = number % p.axis[a].parts;
    number /= p.axis[a].parts;
  }
}

/// Input elements of one voxel on their way to shared memory.
template <class Arithmetic>
struct StagedVoxel {
  using Element = typename Arithmetic::Element;
  static constexpr int kChannels = kChunk * Arithmetic::kElements;
  Element value[kChannels];

  /// `channels` of them are there, `stride` bytes apart.
  __device__ void load(const char* at, int64_t stride, int channels) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c, at += stride) value[c] = load_element(at, c < channels);
  }
  /// Zero unless `inside`. In order, so that no more than one address has to be held.
  __device__ static Element load_element(const char* at, bool inside) {
    if constexpr (sizeof(Element) == 4) {
      float x;
      asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
                   : "=f"(x)
                   : "l"(at), "r"(static_cast<unsigned>(inside)));
      return x;
    } else {
      uint16_t x;
      asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u16 %0, 0; @p ld.global.nc.u16 %0, [%1];}"
                   : "=h"(x)
                   : "l"(at), "r"(static_cast<unsigned>(inside)));
      Element element;
      element.bits = x;
      return element;
    }
  }
  __device__ void store(uint32_t shared, uint32_t pitch) const {
#pragma unroll
    for (int w = 0; w < kChunk; ++w, shared += pitch) {
      Element x[Arithmetic::kElements];
#pragma unroll
      for (int e = 0; e < Arithmetic::kElements; ++e) x[e] = value[w * Arithmetic::kElements + e];
      store_shared(shared, Arithmetic::word(x));
    }
  }
};

/// Where the voxels of a stage of A come from and go to. Each thread keeps, in shared memory, what it needs for the
/// voxels that it stages itself: bytes from the corner (or kOutside), and bytes from the staged corner.
template <int kThreads>
struct HaloStage {
  int number, chunk;  // class, chunk of channels
  int64_t corner;     // elements

  __device__ void locate(const GatherMma& p, const GatherPlace& place, uint32_t* offsets, int item_size, int thread) {
    int part[3], first[3];
    class_parts(p, number, part);
    corner = 0;
    for (int a = 0; a < 3; ++a) {
      const AxisPart& at = p.axis[a].part[part[a]];
      first[a] = (place.q[a] + at.low) * p.axis[a].fold * p.axis[a].in_step + at.residue;
      corner += first[a] * p.in_stride[a + 2];
    }
    for (int v = thread; v < p.rounds * kThreads; v += kThreads) {
      int index = v, offset = 0;
      bool inside = v < p.halo_voxels;
      for (int a = 2; a >= 0; --a) {
        const int step = p.extent[a].take(index) * p.axis[a].in_step;
        inside &= static_cast<unsigned>(first[a] + step) < static_cast<unsigned>(p.axis[a].in_size);
        offset += step * static_cast<int>(p.in_stride[a + 2]);
      }
      offsets[v] = inside ? static_cast<uint32_t>(offset) * item_size : kOutside;
    }
  }
  __device__ static void place_words(const GatherMma& p, int* targets, int thread) {
    const int fold = p.axis[2].fold;
    for (int v = thread; v < p.rounds * kThreads; v += kThreads) {
      int lines = v;
      const int w = p.extent[2].take(lines);  // residues apart, so that neighbouring results read neighbouring words
      const int target = lines * p.line + w % fold * (p.extent[2].value / fold) + w / fold;
      targets[v] = (v < p.halo_voxels ? target : p.pitch - 1) * static_cast<int>(sizeof(uint32_t));  // read by nobody
    }
  }
};

/// Whether a block has results: another phase may have more boxes than its own.
template <int kSlots>
__device__ bool has_results(const GatherMma& p, const GatherPlace& place) {
  if (!p.transposed) return true;
  bool any = false;
  for (int slot = 0; slot < kSlots; ++slot) {
    int phase[3];
    class_parts(p, place.phase + slot, phase);
    bool inside = true;
    for (int a = 0; a < 3; ++a) inside &= place.q[a] < p.axis[a].part[phase[a]].count;
    any |= inside;
  }
  return any;
}

/// Where in the box row `i` of a lane's 2 * kM16 lies. With slots, each 16 rows are the same voxels in another phase.
template <class Tile>
__device__ int row_of_box(int i) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (Tile::kSlots > 1) i %= 2 * Tile::kM16 / Tile::kSlots;
  return i / 2 * (16 * Tile::kWarps) + warp * 16 + i % 2 * 8 + lane / 4;
}

/// The i-th row of a lane in the order of the slots of a voxel.
template <class Tile>
constexpr int result_row(int i) {
  constexpr int kRows = 2 * Tile::kM16 / Tile::kSlots;  // of a slot
  return i % Tile::kSlots * kRows + i / Tile::kSlots;
}

/// nvcc moves none of these before another, which would take registers for addresses and values.
template <class Element>
__device__ void store_in_order(Element* at, Element value, bool really) {
  if constexpr (sizeof(Element) == 4)
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(at), "f"(value),
                 "r"(static_cast<unsigned>(really))
                 : "memory");
  else
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u16 [%0], %1;}" ::"l"(at), "h"(value.bits),
                 "r"(static_cast<unsigned>(really))
                 : "memory");
}

/// out = sum + bias of a box, of `number` and the classes in the slots behind it.
template <class Tile>
__device__ void write_results(const GatherMma& p, const GatherPlace& place, int number,
                              const Accumulator (&sum)[Tile::kM16][Tile::kN8]) {
  using Element = typename Tile::Arithmetic::Element;
  constexpr int kTogether = std::min(4, Tile::kM16);  // bounds registers
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t channel = int64_t{place.group} * p.out_channels + place.column_tile * Tile::kColumns + lane % 4 * 2;
  const int columns = p.out_channels - place.column_tile * Tile::kColumns - lane % 4 * 2;
  const float floor = p.relu ? 0.0f : -INFINITY;
  int phase[Tile::kSlots][3] = {};
  if (p.transposed)
    for (int slot = 0; slot < Tile::kSlots; ++slot) class_parts(p, number + slot, phase[slot]);
#pragma unroll
  for (int first = 0; first < Tile::kM16; first += kTogether) {
    if (Tile::kSlots == 1 && first * 16 * Tile::kWarps >= p.box_voxels) break;
    Element* rows[2 * kTogether];
    unsigned inside = 0;  // a bit a row
#pragma unroll
    for (int i = 0; i < 2 * kTogether; ++i) {
      // With slots, what lies side by side in the result is written one after the other.
      const int row = Tile::kSlots == 1 ? 2 * first + i : result_row<Tile>(2 * first + i);
      int m = row_of_box<Tile>(row);
      bool valid = m < p.box_voxels;
      int64_t offset = place.sample * p.out_stride[0] + channel * p.out_stride[1];
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        const AxisPart& at = p.axis[a].part[phase[row / (2 * Tile::kM16 / Tile::kSlots)][a]];
        const int q = place.q[a] + (a > 0 ? p.box[a].take(m) : m);
        valid &= q < at.count;
        offset += (at.first + int64_t{q} * p.axis[a].out_step) * p.out_stride[a + 2];
      }
      rows[i] = static_cast<Element*>(p.out) + offset;
      inside |= static_cast<unsigned>(valid) << i;
    }
#pragma unroll
    for (int n = 0; n < Tile::kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (n * 8 + j >= columns) continue;
        const int64_t step = (n * 8 + j) * p.out_stride[1];
        const float shift =
            p.bias ? static_cast<float>(static_cast<const Element*>(p.bias)[(channel + n * 8 + j) * p.bias_stride])
                   : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kTogether; ++i) {
          const int row = Tile::kSlots == 1 ? 2 * first + i : result_row<Tile>(2 * first + i);
          const float value = sum[row / 2][n][row % 2 * 2 + j] + shift;
          store_in_order(rows[i] + step, Element(value < floor ? floor : value), inside >> i & 1);  // NaN stays
        }
      }
  }
}

template <class Tile>
void launch_gather(void (*kernel)(GatherMma), GatherMma p, cudaStream_t stream) {
  ++conv_instance<Tile, false, Tile::kColumns>.launches;
  p.rounds = (p.halo_voxels + Tile::kStagers - 1) / Tile::kStagers;
  const size_t bytes = Tile::shared_bytes(p);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
             "conv: shared memory");
  const int64_t tiles = p.batch * p.groups * p.tiles[0] * p.tiles[1] * p.tiles[2];
  const int64_t blocks = tiles * (p.merged ? 1 : p.column_tiles * (p.transposed ? p.classes / p.slots : 1));
  kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, bytes, stream>>>(p);
}

}  // namespace voxgrad::cuda
