// What the blocks of weight_wgmma.cuh sum, and how voxels come to shared memory.
#pragma once

#include "cuda/conv/weight_mma.cuh"

namespace voxgrad::cuda {

/// 16 bytes of which the first `bytes` are copied; the others are zero.
__device__ inline void copy_quad_async(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void load_quad(uint32_t at, uint32_t (&word)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(at));
}

__device__ inline void store_quad(uint32_t at, const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

__device__ inline void round_quad(uint32_t at) {
  uint32_t word[4];
  load_quad(at, word);
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = round_tf32(__uint_as_float(word[i]));
  store_quad(at, word);
}

/// The low parts of four words go `low` bytes further on.
__device__ inline void split_quad(uint32_t at, int low) {
  uint32_t word[4], rest[4];
  load_quad(at, word);
#pragma unroll
  for (int i = 0; i < 4; ++i) Tf32x3::split(word[i], word[i], rest[i]);
  store_quad(at, word);
  store_quad(at + low, rest);
}

__device__ inline void split_word(uint32_t at, int low) {
  uint32_t high, rest;
  Tf32x3::split(load_shared(at), high, rest);
  store_shared(at, high);
  store_shared(at + low, rest);
}

/// What a block sums: columns of 8 of a class, and a tile of rows.
struct WeightPlace {
  int number, group, first_row, rows;  // class; channels of y
  int first_column, columns;           // in the class; of 8
  int first_block, blocks;             // of 8 channels of x
  int64_t range;

  __device__ WeightPlace(const WeightMma& p, int tile_rows) {
    unsigned index = blockIdx.x;
    const auto digit = [&](unsigned base) {
      const unsigned d = index % base;
      index /= base;
      return static_cast<int>(d);
    };
    const int tile = digit(p.column_tiles);
    first_row = digit(p.row_tiles) * tile_rows;
    rows = min(tile_rows, p.out_channels - first_row);
    group = digit(p.groups);
    range = index;
    number = 0;
    while (number + 1 < p.classes && tile >= p.of_class[number + 1].tile_begin) ++number;
    const WeightClass& c = p.of_class[number];
    first_column = (tile - c.tile_begin) * c.tile_columns;
    columns = min(c.tile_columns, c.columns - first_column);
    first_block = first_column / c.taps;
    blocks = (first_column + columns - 1) / c.taps - first_block + 1;
  }
};

/// One box after another.
struct BoxCursor {
  int64_t sample;
  int tile[3];

  __device__ BoxCursor(const WeightMma& p, int64_t box) {
    for (int a = 2; a >= 0; --a) {
      tile[a] = static_cast<int>(box % p.tiles[a]);
      box /= p.tiles[a];
    }
    sample = box;
  }
  __device__ void next(const WeightMma& p) {
    for (int a = 2; a >= 0; --a) {
      if (++tile[a] < p.tiles[a]) return;
      tile[a] = 0;
    }
    ++sample;
  }
};

/// Copies boxes of y and halos of x to shared memory, each thread its own words of all boxes. Where in x a word of the
/// halo comes from is kept, as seen from the halo's corner, in a table in shared memory.
template <class Tile>
struct BoxStage {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  static constexpr int kElements = Arithmetic::kElements, kThreads = Tile::kThreads, kRows = Tile::kRows;
  static constexpr int kBatch = 8;  // channels of x on their way through registers
  static constexpr int64_t kBytes = sizeof(Element);

  const WeightPlace& place;
  uint32_t table;  // address

  __device__ BoxStage(const WeightMma& p, const WeightPlace& at, uint32_t table_address)
      : place(at), table(table_address) {
    make_table(p);
  }

  /// What a thread copies of y's boxes: a word, or four, of each y_step()th channel. Found anew for each box: registers
  /// are scarce.
  struct YWord {
    int word, first;  // in the box; channel
    uint32_t to;      // bytes in a buffer
  };
  __device__ static YWord y_word(const WeightMma& p) {
    const int thread = static_cast<int>(threadIdx.x), unit = p.y_quads ? 4 : 1, units = p.box_words / unit;
    const int word = thread % units * unit, first = thread / units;
    return {word, first, static_cast<uint32_t>(word / 4 * Tile::kQuadBytes + first * 16 + word % 4 * 4)};
  }
  /// From one of this thread's channels of y to the next.
  __device__ static int y_step(const WeightMma& p) { return kThreads * (p.y_quads ? 4 : 1) / p.box_words; }

  __device__ void make_table(const WeightMma& p) const {
    for (int v = static_cast<int>(threadIdx.x); v < p.halo_words; v += kThreads) {
      int d = v;
      const int column = p.extent[2].take(d), h = p.extent[1].take(d);
      const int row = column / p.run;  // (residue, shift)
      const int w = ((column - row * p.run) * kElements + row % kElements) * p.axis[2].fold + row / kElements;
      const int64_t offset =
          (d * p.axis[0].in_step * p.x_stride[2] + h * p.axis[1].in_step * p.x_stride[3] + w * p.x_stride[4]) * kBytes;
      store_shared(table + v * 8, d | h << 10 | w << 20);
      store_shared(table + v * 8 + 4, static_cast<uint32_t>(offset));
    }
  }

  __device__ void box(const WeightMma& p, const BoxCursor& at, uint32_t buffer) const {
    stage_y(p, at, buffer);
    stage_x(p, at, buffer + Tile::y_bytes(p));
  }

  __device__ void stage_y(const WeightMma& p, const BoxCursor& at, uint32_t to) const {
    const YWord mine = y_word(p);
    to += mine.to;
    int voxel = mine.word * kElements;
    const int w = p.box[2].take(voxel) + at.tile[2] * p.box[2].value;
    const int h = p.box[1].take(voxel) + at.tile[1] * p.box[1].value, d = voxel + at.tile[0] * p.box[0].value;
    const bool row_inside = voxel < p.box[0].value && d < p.axis[0].count && h < p.axis[1].count;
    const int left = row_inside ? max(p.axis[2].count - w, 0) : 0;  // elements to the row's end
    const int channels = left > 0 ? place.rows : 0;                 // that are there
    const char* from = static_cast<const char*>(p.y);
    if (mine.first < channels) {
      const int64_t channel = int64_t{place.group} * p.out_channels + place.first_row + mine.first;
      from += (at.sample * p.y_stride[0] + channel * p.y_stride[1] + d * p.y_stride[2] + h * p.y_stride[3] +
               w * p.y_stride[4]) *
              kBytes;
    }
    const int channel_step = y_step(p);
    const int64_t step = channel_step * p.y_stride[1] * kBytes;
    const auto each = [&](auto copy) {
#pragma unroll 4
      for (int c = mine.first; c < kRows; c += channel_step, to += channel_step * 16) {
        copy(c < channels);
        if (c + channel_step < channels) from += step;
      }
    };
    if (p.y_quads) {
      const int bytes = min(left * static_cast<int>(kBytes), 16);
      each([&](bool real) { copy_quad_async(to, from, real ? bytes : 0); });
    } else if constexpr (kElements == 1) {
      each([&](bool real) { copy_word_async(to, from, real); });
    } else {
      each([&](bool real) {
        Element value[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          value[e] =
              real && e < left ? *reinterpret_cast<const Element*>(from + e * p.y_stride[4] * kBytes) : Element(0.0f);
        store_shared(to, Arithmetic::word(value));
      });
    }
  }
  __device__ void stage_x(const WeightMma& p, const BoxCursor& at, uint32_t to) const {
    const int fold = p.axis[2].fold;
    int first[3], rest = place.number;  // of the halo
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const AxisParts& axis = p.axis[a];
      const AxisPart& part = axis.part[rest % axis.parts];
      rest /= axis.parts;
      first[a] = (at.tile[a] * p.box[a].value + part.low) * axis.fold * axis.in_step + part.residue;
    }
    const int64_t channel = int64_t{place.group} * p.in_channels + place.first_block * 8;
    const char* const corner = static_cast<const char*>(p.x) +
                               (at.sample * p.x_stride[0] + channel * p.x_stride[1] + first[0] * p.x_stride[2] +
                                first[1] * p.x_stride[3] + first[2] * p.x_stride[4]) *
                                   kBytes;
    const int channels = min(place.blocks * 8, p.in_channels - place.first_block * 8);  // that are there
#pragma unroll 1
    for (int v = static_cast<int>(threadIdx.x); v < p.halo_words; v += kThreads) {
      const uint32_t position = load_shared(table + v * 8);
      const char* const from = corner + load_shared(table + v * 8 + 4);
      const int d = first[0] + static_cast<int>(position & 1023) * p.axis[0].in_step;
      const int h = first[1] + static_cast<int>(position >> 10 & 1023) * p.axis[1].in_step;
      const int w = first[2] + static_cast<int>(position >> 20);
      const bool row_inside = static_cast<unsigned>(d) < static_cast<unsigned>(p.axis[0].in_size) &&
                              static_cast<unsigned>(h) < static_cast<unsigned>(p.axis[1].in_size);
      bool inside[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        inside[e] = row_inside && static_cast<unsigned>(w + e * fold) < static_cast<unsigned>(p.axis[2].in_size);
      if constexpr (kElements == 1)
        copy_channels(p, to + v * 4, from, inside[0] ? channels : 0);
      else
        load_channels(p, to + v * 4, from, channels, inside);
    }
  }

  /// A word of the block's channels; zero from number `real` on.
  __device__ void copy_channels(const WeightMma& p, uint32_t to, const char* from, int real) const {
    const int64_t step = p.x_stride[1] * kBytes;
#pragma unroll 1
    for (int block = 0; block < place.blocks; ++block, real -= 8) {
      if (real >= 8) {
#pragma unroll
        for (int i = 0; i < 8; ++i, to += p.pitch * 4, from += step) copy_word_async(to, from, true);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i, to += p.pitch * 4, from += step)
          copy_word_async(to, i < real ? from : p.x, i < real);
      }
    }
  }

  __device__ void load_channels(const WeightMma& p, uint32_t to, const char* from, int real,
                                const bool (&inside)[kElements]) const {
    const int64_t step = p.x_stride[1] * kBytes, next = p.axis[2].fold * p.x_stride[4] * kBytes;
#pragma unroll 1
    for (int batch = 0; batch < place.blocks * 8; batch += kBatch, real -= kBatch) {
      Element value[kBatch][kElements];
#pragma unroll
      for (int i = 0; i < kBatch; ++i, from += step)
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          value[i][e] = i < real && inside[e] ? *reinterpret_cast<const Element*>(from + e * next) : Element(0.0f);
#pragma unroll
      for (int i = 0; i < kBatch; ++i, to += p.pitch * 4) store_shared(to, Arithmetic::word(value[i]));
    }
  }

  /// Rounds, or splits, what this thread copied of y.
  __device__ void finish_y(const WeightMma& p, uint32_t buffer) const {
    const YWord mine = y_word(p);
    const int step = y_step(p);
    const auto each = [&](auto finish) {
      uint32_t at = buffer + mine.to;
#pragma unroll 4
      for (int c = mine.first; c < kRows; c += step, at += step * 16) finish(at);
    };
    if constexpr (Arithmetic::kRounds) {
      if (p.y_quads)
        each([](uint32_t at) { round_quad(at); });
      else
        each([](uint32_t at) { round_word(at); });
    }
    if constexpr (Arithmetic::kParts == 2) {
      const int low = Tile::part_bytes(p);
      if (p.y_quads)
        each([&](uint32_t at) { split_quad(at, low); });
      else
        each([&](uint32_t at) { split_word(at, low); });
    }
  }
};

}  // namespace voxgrad::cuda
