// Convolution forward and transposed on tensor cores, for every geometry that conv_parts.h can describe: an implicit
// matrix product of
//
//   A: 256 results (a box of three axes, of one sample and one phase) x 8 words of input channels,
//   B: 8 words of input channels x kColumns output channels, for each tap.
//
// Why so: the peers gather the input anew for each tap. Here a block stages the box of inputs that all taps of 8
// words of channels need (the halo) once, in shared memory as [word][voxel]; a tap is nothing but an offset in it,
// and the same for every thread. Neighbouring lanes read neighbouring voxels without bank conflicts, because 8
// words of channels lie 8 banks apart. The next halo travels through registers, where it is rounded and halves are
// paired, while this one is multiplied; the weights, packed in the order in which lanes want them (conv_pack.cu),
// follow in a ring of three stages. Residues of strided inputs and phases of strided results are parts of their own
// (conv_parts.h), so that no tap is multiplied for nothing.
#pragma once

#include <algorithm>

#include "cuda/conv_parts.h"
#include "cuda/launch.h"
#include "cuda/mma.cuh"

namespace voxgrad::cuda {

/// Words of input channels that are staged at a time.
inline constexpr int kChunk = 8;
inline constexpr int kMaxTaps = 1024;
inline constexpr int kMaxClasses = 64;

/// What the kernel is told. A class is a part of an axis for each axis: of the results (transposed) or of the inputs.
struct GatherMma {
  const void* in;
  const uint4* weights;  // packed
  const void* bias;      // or null
  void* out;
  int64_t in_stride[5], out_stride[5], bias_stride;
  int in_channels, out_channels;  // of a group
  int groups, column_tiles, chunks, kernel_taps;
  bool transposed, relu;
  int box[3], extent[3], halo_voxels, pitch;  // extent: of the halo; pitch: voxels between the staged words
  int tiles[3], classes, taps;                // taps: most of a block
  int64_t batch;
  AxisParts axis[3];
};

template <class Arithmetic_, int kN8_, int kWarpsN_>
struct GatherTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kM16 = 4, kN8 = kN8_, kWarpsM = 4, kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kRows = 16 * kM16 * kWarpsM, kColumns = 8 * kN8 * kWarpsN;
  static constexpr int kSlab = kColumns * kChunk * Arithmetic::kParts;  // words of one tap of B
  static constexpr int kStepTaps = std::clamp(2048 / kSlab, 2, 8), kStages = 3;
  static constexpr int kAccumulators = 4 * kM16 * kN8;
  static constexpr int kBlocks = kWarpsN > 1 ? 1 : kAccumulators > 64 ? 2 : 3;  // a multiprocessor: bounds registers

  static size_t shared_bytes(const GatherMma& p) {
    return sizeof(uint32_t) * (2 * kChunk * p.pitch + kStages * kStepTaps * kSlab + p.halo_voxels) +
           sizeof(int2) * p.taps;
  }
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
  place.column_tile = digit(p.column_tiles);
  place.phase = p.transposed ? digit(p.classes) : 0;
  for (int a = 2; a >= 0; --a) place.q[a] = digit(p.tiles[a]) * p.box[a];
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

/// Fills the table of taps: where tap t's inputs lie in the halo, and its number in the packed weights; class after
/// class. begin[c] is the class's first entry.
template <int kThreads>
__device__ void make_tap_table(const GatherMma& p, const GatherPlace& place, int2* table, int (&begin)[kMaxClasses + 1]) {
  const int first_class = p.transposed ? place.phase : 0, classes = p.transposed ? 1 : p.classes;
  if (threadIdx.x == 0) {
    begin[0] = 0;
    for (int c = 0; c < classes; ++c) {
      int part[3], taps = 1;
      class_parts(p, first_class + c, part);
      for (int a = 0; a < 3; ++a) taps *= p.axis[a].part[part[a]].taps;
      begin[c + 1] = begin[c] + taps;
    }
  }
  __syncthreads();
  for (int c = 0; c < classes; ++c) {
    int part[3];
    class_parts(p, first_class + c, part);
    for (int i = static_cast<int>(threadIdx.x); i < begin[c + 1] - begin[c]; i += kThreads) {
      int index = i, offset[3], tap[3];
      for (int a = 2; a >= 0; --a) {
        const AxisParts& axis = p.axis[a];
        const AxisPart& at = axis.part[part[a]];
        const int t = index % at.taps;
        index /= at.taps;
        tap[a] = at.tap_first + t * at.tap_step;
        const int row = at.start + t * at.step - at.low * axis.fold;  // not negative
        offset[a] = row % axis.fold * (p.extent[a] / axis.fold) + row / axis.fold;
      }
      table[begin[c] + i] = {(offset[0] * p.extent[1] + offset[1]) * p.extent[2] + offset[2],
                             (tap[0] * p.axis[1].kernel + tap[1]) * p.axis[2].kernel + tap[2]};
    }
  }
}

/// Input elements of one voxel on their way to shared memory.
template <class Arithmetic>
struct StagedVoxel {
  typename Arithmetic::Element value[kChunk * Arithmetic::kElements];

  __device__ void load(const typename Arithmetic::Element* at, int64_t stride, int channels) {
#pragma unroll
    for (int c = 0; c < kChunk * Arithmetic::kElements; ++c)
      value[c] = c < channels ? at[c * stride] : typename Arithmetic::Element(0.0f);
  }
  __device__ void store(uint32_t* shared, int pitch) const {
#pragma unroll
    for (int w = 0; w < kChunk; ++w) {
      typename Arithmetic::Element x[Arithmetic::kElements];
#pragma unroll
      for (int e = 0; e < Arithmetic::kElements; ++e) x[e] = value[w * Arithmetic::kElements + e];
      shared[w * pitch] = Arithmetic::word(x);
    }
  }
};

/// One stage of A: class and chunk of channels, and the input positions of its corner.
struct HaloStage {
  int number, chunk;  // of the class
  int corner[3];

  __device__ void locate(const GatherMma& p, const GatherPlace& place) {
    int part[3];
    class_parts(p, p.transposed ? place.phase : number, part);
    for (int a = 0; a < 3; ++a) {
      const AxisPart& at = p.axis[a].part[part[a]];
      corner[a] = (place.q[a] + at.low) * p.axis[a].fold * p.axis[a].in_step + at.residue;
    }
  }
  __device__ void next(const GatherMma& p, const GatherPlace& place) {
    if (++chunk < p.chunks) return;
    chunk = 0;
    ++number;
    if (!p.transposed && number < p.classes) locate(p, place);
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) gather_mma(const __grid_constant__ GatherMma p) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  constexpr int kM16 = Tile::kM16, kN8 = Tile::kN8, kParts = Arithmetic::kParts, kThreads = Tile::kThreads;
  constexpr int kBuffer = Tile::kStepTaps * Tile::kSlab;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ int begin[kMaxClasses + 1];
  uint32_t* const b_ring = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint32_t* const a_words = b_ring + Tile::kStages * kBuffer;
  const int a_buffer = kChunk * p.pitch;
  int2* const taps = reinterpret_cast<int2*>(a_words + 2 * a_buffer);
  uint32_t* const halo = reinterpret_cast<uint32_t*>(taps + p.taps);

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_m = warp % Tile::kWarpsM, warp_n = warp / Tile::kWarpsM;
  const GatherPlace place = gather_place(p);
  {  // boxes beyond this phase's results (another phase may have more of them)
    int part[3];
    class_parts(p, place.phase, part);
    for (int a = 0; a < 3; ++a)
      if (place.q[a] >= p.axis[a].part[part[a]].count) return;
  }

  for (int v = thread; v < p.halo_voxels; v += kThreads) {
    const int w = v % p.extent[2], h = v / p.extent[2] % p.extent[1], d = v / p.extent[2] / p.extent[1];
    halo[v] = static_cast<uint32_t>(d << 20 | h << 10 | w);
  }
  make_tap_table<kThreads>(p, place, taps, begin);
  __syncthreads();
  const int classes = p.transposed ? 1 : p.classes;

  // ---- A on its way
  const Element* const in = static_cast<const Element*>(p.in) + place.sample * p.in_stride[0] +
                            place.group * int64_t{p.in_channels} * p.in_stride[1];
  const int rounds = (p.halo_voxels + kThreads - 1) / kThreads;
  HaloStage stage{0, 0, {}};
  stage.locate(p, place);
  StagedVoxel<Arithmetic> voxel;
  const auto load_voxel = [&](int round) {
    const int v = thread + round * kThreads;
    int channels = 0;
    const Element* at = in;
    if (v < p.halo_voxels) {
      const uint32_t packed = halo[v];
      const int position[3] = {stage.corner[0] + static_cast<int>(packed >> 20) * p.axis[0].in_step,
                               stage.corner[1] + static_cast<int>(packed >> 10 & 1023) * p.axis[1].in_step,
                               stage.corner[2] + static_cast<int>(packed & 1023) * p.axis[2].in_step};
      bool inside = true;
#pragma unroll
      for (int a = 0; a < 3; ++a) inside &= static_cast<unsigned>(position[a]) < static_cast<unsigned>(p.axis[a].in_size);
      if (inside) {
        constexpr int kChannels = kChunk * Arithmetic::kElements;
        channels = p.in_channels - stage.chunk * kChannels;
        at += stage.chunk * kChannels * p.in_stride[1] + position[0] * p.in_stride[2] +
              position[1] * p.in_stride[3] + position[2] * p.in_stride[4];
      }
    }
    voxel.load(at, p.in_stride[1], channels);
  };
  const auto store_voxel = [&](int round, uint32_t* buffer) {
    int v = thread + round * kThreads;
    if (v >= p.halo_voxels) return;
    const int fold = p.axis[2].fold;
    if (fold > 1) {  // residues apart, so that neighbouring results read neighbouring words
      const int w = static_cast<int>(halo[v] & 1023);
      v += w % fold * (p.extent[2] / fold) + w / fold - w;
    }
    voxel.store(buffer + v, p.pitch);
  };

  // ---- B on its way
  const uint4* const weights =
      p.weights + (int64_t{place.group} * p.column_tiles + place.column_tile) * p.chunks * p.kernel_taps *
                      (Tile::kSlab / 4);
  int next_class = 0, next_chunk = 0, next_tap = 0, next_buffer = 0;
  const auto fetch_weights = [&] {
    if (next_class < classes) {
      const int2* table = taps + begin[next_class] + next_tap;
      const int left = begin[next_class + 1] - begin[next_class] - next_tap;
      const int units = min(left, Tile::kStepTaps) * (Tile::kSlab / 4);
      const uint4* chunk = weights + int64_t{next_chunk} * p.kernel_taps * (Tile::kSlab / 4);
      uint4* const to = reinterpret_cast<uint4*>(b_ring + next_buffer * kBuffer);
      for (int i = thread; i < units; i += kThreads)
        copy_async(to + i, chunk + table[i / (Tile::kSlab / 4)].y * (Tile::kSlab / 4) + i % (Tile::kSlab / 4));
      next_tap += Tile::kStepTaps;
      if (next_tap >= begin[next_class + 1] - begin[next_class]) {
        next_tap = 0;
        if (++next_chunk == p.chunks) next_chunk = 0, ++next_class;
      }
      if (++next_buffer == Tile::kStages) next_buffer = 0;
    }
    commit_copies();
  };

  int rows[2 * kM16];  // of A's words: this lane's rows and its word of channels
#pragma unroll
  for (int i = 0; i < 2 * kM16; ++i) {
    const int m = warp_m * 16 * kM16 + i * 8 + g;
    const int w = m % p.box[2], h = m / p.box[2] % p.box[1], d = m / p.box[2] / p.box[1];
    rows[i] = t * p.pitch + (d < p.box[0] ? (d * p.extent[1] + h) * p.extent[2] + w : 0);
  }

  fetch_weights();
  fetch_weights();
  for (int round = 0; round < rounds; ++round) {
    load_voxel(round);
    store_voxel(round, a_words);
  }

  Accumulator sum[kM16][kN8] = {};
  int buffer = 0, a_now = 0;
  const int stages = classes * p.chunks;
  for (int s = 0, number = 0, chunk = 0; s < stages; ++s) {
    const bool more = s + 1 < stages;
    stage.next(p, place);
    int round = more ? 0 : rounds;
    const int first = begin[number], last = begin[number + 1];
    for (int tap = first; tap < last; tap += Tile::kStepTaps) {
      await_copies<1>();
      __syncthreads();
      fetch_weights();
      const bool staging = round < rounds;
      if (staging) load_voxel(round);
      const uint32_t* const a = a_words + a_now;
      const uint32_t* const b = b_ring + buffer * kBuffer + (warp_n * kN8 * 32 + lane) * 2 * kParts;
#pragma unroll
      for (int j = 0; j < Tile::kStepTaps; ++j) {
        if (tap + j >= last) break;
        const int offset = taps[tap + j].x;
        uint32_t a_fragment[kM16][4], b_fragment[kN8][2 * kParts];
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
          const uint32_t* from = b + j * Tile::kSlab + n * 64 * kParts;
          if constexpr (kParts == 1)
            *reinterpret_cast<uint2*>(b_fragment[n]) = *reinterpret_cast<const uint2*>(from);
          else
            *reinterpret_cast<uint4*>(b_fragment[n]) = *reinterpret_cast<const uint4*>(from);
        }
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
          const uint32_t* low = a + rows[2 * m] + offset;
          const uint32_t* high = a + rows[2 * m + 1] + offset;
          a_fragment[m][0] = low[0];
          a_fragment[m][1] = high[0];
          a_fragment[m][2] = low[4 * p.pitch];
          a_fragment[m][3] = high[4 * p.pitch];
        }
        Arithmetic::multiply(sum, a_fragment, b_fragment);
      }
      if (staging) store_voxel(round++, a_words + (a_buffer - a_now));
      if (++buffer == Tile::kStages) buffer = 0;
    }
    for (; round < rounds; ++round) {  // too few taps to hide them all behind
      load_voxel(round);
      store_voxel(round, a_words + (a_buffer - a_now));
    }
    a_now = a_buffer - a_now;
    if (++chunk == p.chunks) chunk = 0, ++number;
  }

  // ---- results
  int part[3];
  class_parts(p, place.phase, part);
  Element* const out = static_cast<Element*>(p.out) + place.sample * p.out_stride[0];
  const Element* const bias = static_cast<const Element*>(p.bias);
#pragma unroll
  for (int i = 0; i < 2 * kM16; ++i) {
    const int m = warp_m * 16 * kM16 + i * 8 + g;
    const int q[3] = {place.q[0] + m / p.box[2] / p.box[1], place.q[1] + m / p.box[2] % p.box[1],
                      place.q[2] + m % p.box[2]};
    bool inside = m < p.box[0] * p.box[1] * p.box[2];
    int64_t offset = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const AxisPart& at = p.axis[a].part[part[a]];
      inside &= q[a] < at.count;
      offset += (at.first + int64_t{q[a]} * p.axis[a].out_step) * p.out_stride[a + 2];
    }
    if (!inside) continue;
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = place.column_tile * Tile::kColumns + (warp_n * kN8 + n) * 8 + 2 * t + j;
        if (column >= p.out_channels) continue;
        const int64_t channel = int64_t{place.group} * p.out_channels + column;
        float value = sum[i / 2][n][i % 2 * 2 + j];
        if (bias) value += static_cast<float>(bias[channel * p.bias_stride]);
        if (p.relu) value = value > 0 || value != value ? value : 0.0f;
        out[offset + channel * p.out_stride[1]] = Element(value);
      }
  }
}

/// Output channels that a block takes, of those that are compiled: the least waste, then the widest.
int gather_columns(int out_channels, bool three_products);

/// Queues the kernel for a problem whose packed weights have `columns` columns (gather_columns()).
template <class Arithmetic>
void launch_gather_mma(const GatherMma& problem, int columns, cudaStream_t stream);

template <class Tile>
void launch_gather_tile(const GatherMma& p, cudaStream_t stream) {
  const size_t bytes = Tile::shared_bytes(p);
  check_cuda(cudaFuncSetAttribute(gather_mma<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "conv: shared memory");
  const int64_t blocks = p.batch * p.groups * p.column_tiles * p.tiles[0] * p.tiles[1] * p.tiles[2] *
                         (p.transposed ? p.classes : 1);
  gather_mma<Tile><<<static_cast<unsigned>(blocks), Tile::kThreads, bytes, stream>>>(p);
}

}  // namespace voxgrad::cuda
