// Code that the kernels for few input channels share: the copies of inputs to shared memory.
//
// The input channels and the taps together form one axis of an implicit GEMM (CUTLASS:
// IteratorAlgorithm::kFewChannels), because products of the tensor cores would otherwise be mostly empty. A CTA copies
// the inputs of a box of results to shared memory, where zeros surround the volume. A word of halves holds two inputs
// of a line, so that a fragment of a product consists of words at the addresses
//
//   box + voxel offset + tap offset
//
// for any stride and dilation. The input may have any strides; y is dense and channels-last.
#pragma once

#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/few_inputs.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda {

/// The input of a convolution, and its division into boxes.
struct FewInputs {
  const char* data;
  int64_t stride[4] = {};  // bytes, along samples, depth, height and width
  int channel_stride;      // bytes
  int size[3] = {};        // inputs along each axis, up to the last one that a tap reads
  int out_size[3] = {};    // results along each axis
  int step[3] = {};        // stride of the convolution
  int padding[3] = {};     // of the convolution
  int dilation[3] = {};    // of the convolution
  Divisor kernel[3] = {};  // taps along each axis
  Divisor tile[3] = {};    // results of a CTA tile along each axis
  Divisor tiles[3] = {};   // CTA tiles along each axis
  Divisor box[3] = {};     // inputs of a CTA tile along each axis
  int rows;                // lines of all channels in a box
  int half_distance;       // inputs from the first to the second half of a word
  int count;               // CTA tiles of all samples
};

/// Returns the description of the input and the boxes of a plan.
inline FewInputs describe_few_inputs(const View& x, const ConvProblem& problem, const FewInputsPlan& plan) {
  const auto bytes = static_cast<int64_t>(item_size(x.dtype));
  FewInputs in{.data = x.as<char>(),
               .channel_stride = problem.in_channels == 1 ? 0 : static_cast<int>(x.stride[1] * bytes),
               .rows = plan.rows,
               .half_distance = plan.half_distance,
               .count = static_cast<int>(problem.batch * plan.tiles[0] * plan.tiles[1] * plan.tiles[2])};
  in.stride[0] = x.stride[0] * bytes;
  for (int a = 0; a < 3; ++a) {
    in.stride[a + 1] = x.stride[a + 2] * bytes;
    in.size[a] = static_cast<int>(read_size(problem, a));
    in.out_size[a] = static_cast<int>(problem.out_size[a]);
    in.step[a] = static_cast<int>(problem.geometry.stride[a]);
    in.padding[a] = static_cast<int>(problem.geometry.padding[a]);
    in.dilation[a] = static_cast<int>(problem.geometry.dilation[a]);
    in.kernel[a] = Divisor(problem.kernel[a]);
    in.tile[a] = Divisor(plan.tile[a]);
    in.tiles[a] = Divisor(plan.tiles[a]);
    in.box[a] = Divisor(plan.box[a]);
  }
  return in;
}

/// Returns the offset of a position in a box, in bytes.
__device__ inline uint32_t box_offset(const FewInputs& in, int channel, int d, int h, int w) {
  return static_cast<uint32_t>(((channel * in.box[0].value() + d) * in.box[1].value() + h) * in.box[2].value() + w) * 4;
}
/// Returns the offset of a tap from the first tap in a box, in bytes.
__device__ inline uint32_t tap_offset(const FewInputs& in, int channel, int d, int h, int w) {
  return box_offset(in, channel, d * in.dilation[0], h * in.dilation[1], w * in.dilation[2]);
}

/// A CTA tile: its sample, its first result along each axis, and its results along each axis.
struct FewInputsTile {
  int sample;
  int first[3];
  int count[3];
  __device__ FewInputsTile(const FewInputs& in, int number) {
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      first[a] = in.tiles[a].take_digit(number) * in.tile[a].value();
      count[a] = min(in.tile[a].value(), in.out_size[a] - first[a]);
    }
    sample = number;
  }
  /// Returns the number of the first result among all voxels of y.
  __device__ int64_t first_voxel(const FewInputs& in) const {
    return ((int64_t{sample} * in.out_size[0] + first[0]) * in.out_size[1] + first[1]) * in.out_size[2] + first[2];
  }
};

/// A result in a CTA tile, as an entry of the list of voxels in shared memory.
struct FewInputsVoxel {
  uint32_t number;    // of the voxel in y, minus that of the first voxel of the tile
  uint32_t position;  // in the tile, one byte per axis
  __device__ bool lies_in(const FewInputsTile& tile) const {
    return static_cast<int>(position >> 16) < tile.count[0] && static_cast<int>(position >> 8 & 255) < tile.count[1] &&
           static_cast<int>(position & 255) < tile.count[2];
  }
};
__device__ inline FewInputsVoxel load_voxel(uint32_t list, int voxel) {
  uint32_t entry[2];
  load_shared(list + voxel * kFewInputsVoxelBytes, entry);
  return {entry[0], entry[1]};
}
/// Returns the offset of the input that a result reads at the first tap, in bytes.
__device__ inline uint32_t load_voxel_offset(uint32_t list, int voxel) {
  return load_shared(list + voxel * kFewInputsVoxelBytes + 8);
}

/// Lists the results of a CTA tile, and the lines of a box as offset in bytes and position along depth and height.
/// Results after the last one of the tile have a position that lies in no tile.
__device__ inline void list_box(const FewInputs& in, uint32_t voxels, int voxel_count, uint32_t rows) {
  const int thread = static_cast<int>(threadIdx.x), threads = kFewInputsThreads;
  for (int i = thread; i < voxel_count; i += threads) {
    int rest = i;
    const int w = in.tile[2].take_digit(rest), h = in.tile[1].take_digit(rest), d = rest;
    const bool exists = d < in.tile[0].value();
    store_shared(voxels + i * kFewInputsVoxelBytes,
                 {static_cast<uint32_t>((d * in.out_size[1] + h) * in.out_size[2] + w),
                  exists ? static_cast<uint32_t>(d << 16 | h << 8 | w) : 0xffffffu,
                  exists ? box_offset(in, 0, d * in.step[0], h * in.step[1], w * in.step[2]) : 0u, 0u});
  }
  for (int i = thread; i < in.rows; i += threads) {
    int rest = i;
    const int h = in.box[1].take_digit(rest), d = in.box[0].take_digit(rest);
    store_shared(rows + i * kFewInputsRowBytes,
                 static_cast<uint32_t>(rest * in.channel_stride + d * in.stride[1] + h * in.stride[2]));
    store_shared(rows + i * kFewInputsRowBytes + 4, static_cast<uint32_t>(d << 16 | h));
  }
}

__device__ inline void store_half(uint32_t address, uint16_t bits) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
}

/// Copies the inputs of a CTA tile to a box in shared memory. A warp copies 32 inputs of a line at a time.
template <class T>
__device__ void load_box(const FewInputs& in, const FewInputsTile& tile, uint32_t rows, uint32_t box) {
  constexpr int kAtOnce = 4;  // loads that run at a time
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int width = in.box[2].value();
  int begin[3];  // input position of the box
#pragma unroll
  for (int a = 0; a < 3; ++a) begin[a] = tile.first[a] * in.step[a] - in.padding[a];
  const char* const corner = in.data + tile.sample * in.stride[0] + begin[0] * in.stride[1] + begin[1] * in.stride[2];
  for (int x = lane; x < width; x += 32) {
    const int w = begin[2] + x;
    const bool in_line = static_cast<unsigned>(w) < static_cast<unsigned>(in.size[2]);
    const char* const from = corner + w * in.stride[3];
    for (int first = warp; first < in.rows; first += kAtOnce * kFewInputsWarps) {
      T value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kFewInputsWarps;
        uint32_t entry[2];
        load_shared(rows + min(row, in.rows - 1) * kFewInputsRowBytes, entry);
        const int d = begin[0] + static_cast<int>(entry[1] >> 16), h = begin[1] + static_cast<int>(entry[1] & 0xffff);
        value[i] = load_element<T>(from + static_cast<int>(entry[0]),
                                   in_line && static_cast<unsigned>(d) < static_cast<unsigned>(in.size[0]) &&
                                       static_cast<unsigned>(h) < static_cast<unsigned>(in.size[1]));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kFewInputsWarps;
        if (row >= in.rows) break;
        const uint32_t to = box + (row * width + x) * 4;
        if constexpr (sizeof(T) == 4) {
          store_shared(to, round_for_tensor_cores(value[i]));
        } else {
          store_half(to, value[i].bits);
          if (x >= in.half_distance) store_half(to - in.half_distance * 4 + 2, value[i].bits);
        }
      }
    }
  }
}

void few_inputs_wgrad(const ConvCall& call, const ConvProblem& problem, const FewInputsPlan& plan,
                      const Launch& launch);

}  // namespace voxgrad::cuda
