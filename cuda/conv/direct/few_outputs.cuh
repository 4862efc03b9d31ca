// Code of the kernels for few output channels: the tile of a CTA, and the lists and operands in shared memory.
#pragma once

#include "cuda/conv/common/epilogue.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/sm90/wgmma.cuh"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda {

/// The taps of a result along height and width.
enum class FewOutputsSums : uint8_t { two, three, five, up_to_three, any };

struct FewOutputsParams {
  const char* in;
  int64_t in_stride[4] = {};  // bytes, along samples, depth, height and width
  int in_size[3] = {};
  int in_channels;
  const void* weight;
  int64_t weight_stride[5] = {};  // elements
  EpilogueParams epilogue;
  void* out;
  int64_t out_stride[5] = {};  // elements
  int out_size[3] = {};
  int out_channels;
  Divisor kernel[3] = {};  // taps along each axis
  Divisor step[3] = {};    // stride along each axis
  int padding[3] = {};
  Divisor inputs[2] = {};  // inputs of a CTA tile along height and width
  int reach[3] = {};       // inputs before the first q of a CTA tile (FewOutputsPlan)
  int first[3] = {};       // first q along each axis
  int count[3] = {};       // number of q along each axis
  Divisor tile[3] = {};    // q of a CTA tile along each axis
  Divisor tiles[3] = {};   // CTA tiles along each axis
  int chunks;              // of input channels
  int channels;            // result channels of a CTA
  int64_t next_plane;      // bytes from the last chunk of a plane to the first one of the next plane
  FewOutputsSums sums;
};

/// A CTA tile: its sample, its first result channel, and its first q and number of q along each axis.
struct FewOutputsTile {
  int sample;
  int first_channel;
  int first[3];
  int count[3];
  __device__ explicit FewOutputsTile(const FewOutputsParams& p) {
    int number = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int begin = p.tiles[a].take_digit(number) * p.tile[a].value();
      first[a] = p.first[a] + begin;
      count[a] = min(p.tile[a].value(), p.count[a] - begin);
    }
    sample = number;
    first_channel = static_cast<int>(blockIdx.y) * p.channels;
  }
};

/// The sets of columns of the weights in shared memory: the taps along the depth in cyclic order.
constexpr int weight_sets(int depth) { return 2 * depth - 1; }

/// Copies the weights to shared memory, as operand B: [chunk][k-step][half of the words][set][column][4 words]. Weights
/// of missing channels, taps and columns are zero.
template <class Arithmetic, int kThreads, int kDepth, int kColumns>
__device__ void list_weights(const FewOutputsParams& p, int first_channel, uint32_t weights) {
  using T = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kAll = weight_sets(kDepth) * kColumns;
  constexpr int kAtOnce = 4;  // words that a thread loads at a time
  for (int first = static_cast<int>(threadIdx.x); first < p.chunks * 16 * kAll; first += kAtOnce * kThreads) {
    T value[kAtOnce][kElements];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kThreads, k_step = i / (8 * kAll), half = i / (4 * kAll) % 2;
      const int word = k_step / 2 * 16 + i % 4 * 4 + k_step % 2 * 2 + half;
      const int d = i / 4 % kAll / kColumns % kDepth;
      int column = i / 4 % kColumns;
      const int w = p.kernel[2].take_digit(column), h = p.kernel[1].take_digit(column);
      const int channel = first_channel + column;
      const bool exists = d < p.kernel[0].value() && channel < p.out_channels;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int from = word * kElements + e;
        value[j][e] = T(0.0f);
        if (exists && from < p.in_channels)
          value[j][e] =
              static_cast<const T*>(p.weight)[from * p.weight_stride[0] + channel * p.weight_stride[1] +
                                              d * p.weight_stride[2] + h * p.weight_stride[3] + w * p.weight_stride[4]];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kThreads;
      if (i < p.chunks * 16 * kAll) store_shared(weights + i * 4, Arithmetic::word(value[j]));
    }
  }
  fence_async_proxy();
}

/// Returns the wgmma descriptor of the weights of a k-step. `columns` is the number of columns in all sets.
__device__ inline uint64_t weight_operand(uint32_t weights, int columns) {
  return (weights & 0x3ffff) >> 4 | static_cast<uint64_t>(columns) << 16 | uint64_t{8} << 32;
}

/// The results of a CTA tile in one plane, as lists in shared memory. An entry of `list` has two words:
///   - the offset of the product of the first tap in bytes | taps along height << 18 | taps along width << 22 |
///     result channel << 26
///   - the offset of the result in elements, or kOutside if the result does not exist
struct FewOutputsResults {
  static constexpr int kOutside = INT_MIN;
  uint32_t list;
  uint32_t bias;  // float32, one for each result channel of the CTA
  int count;
};

/// Lists the results of a plane of the CTA tile, and the bias of its channels.
template <class T, int kThreads>
__device__ void list_results(const FewOutputsParams& p, const FewOutputsTile& tile, int pitch,
                             const FewOutputsResults& results) {
  for (int i = static_cast<int>(threadIdx.x); i < results.count; i += kThreads) {
    int rest = i;
    const int channel = take_digit(rest, p.channels);
    int s[2], q[2], result[2];
    bool exists = tile.first_channel + channel < p.out_channels;
#pragma unroll
    for (int a = 1; a >= 0; --a) {
      s[a] = p.step[a + 1].take_digit(rest);
      q[a] = p.tile[a + 1].take_digit(rest);
      result[a] = (tile.first[a + 1] + q[a]) * p.step[a + 1].value() + s[a] - p.padding[a + 1];
      exists &= q[a] < tile.count[a + 1] && static_cast<unsigned>(result[a]) < static_cast<unsigned>(p.out_size[a + 1]);
    }
    const int input = (q[0] + p.reach[1]) * p.inputs[1].value() + q[1] + p.reach[2];
    const int taps[2] = {p.step[1].divide(p.kernel[1].value() - s[0] + p.step[1].value() - 1),
                         p.step[2].divide(p.kernel[2].value() - s[1] + p.step[2].value() - 1)};
    const int column =  // without taps, the first tap does not exist
        taps[0] > 0 && taps[1] > 0 ? (channel * p.kernel[1].value() + s[0]) * p.kernel[2].value() + s[1] : 0;
    const int64_t offset =
        (tile.first_channel + channel) * p.out_stride[1] + result[0] * p.out_stride[3] + result[1] * p.out_stride[4];
    store_shared(results.list + i * kFewOutputsResultBytes,
                 static_cast<uint32_t>((column * pitch + input) * 4 | taps[0] << 18 | taps[1] << 22 | channel << 26));
    store_shared(results.list + i * kFewOutputsResultBytes + 4,
                 static_cast<uint32_t>(exists ? static_cast<int>(offset) : FewOutputsResults::kOutside));
  }
  for (int c = static_cast<int>(threadIdx.x); c < p.channels; c += kThreads) {
    const int channel = tile.first_channel + c;
    const float bias = channel < p.out_channels ? p.epilogue.bias_of<T>(channel) : 0.0f;
    store_shared(results.bias + c * 4, __float_as_uint(bias));
  }
}

/// Copies the inputs of a lane in the planes of a CTA tile to a ring of stages in shared memory: 16 bytes of channels
/// of kRows inputs at a time. Each lane reads only what it has copied.
template <class T, int kThreads, int kRows, int kStages>
struct FewOutputsInputs {
  static constexpr uint32_t kStageBytes = kThreads * kRows * 16;
  const FewOutputsParams& p;
  int offset[kRows];        // of the inputs in a plane, in bytes
  bool lies_inside[kRows];  // in a plane of the volume
  uint32_t ring;            // of this lane
  uint32_t written = 0;     // offset of the stage that is copied next
  uint32_t read = 0;        // offset of the stage that is read next
  int plane;                // that is copied next
  int end;                  // the plane after the last one
  int chunk = 0;            // that is copied next
  const char* at;           // the chunk that is copied next

  __device__ FewOutputsInputs(const FewOutputsParams& params, const FewOutputsTile& tile, uint32_t shared)
      : p(params), plane(tile.first[0] - params.reach[0]), end(min(tile.first[0] + tile.count[0], params.in_size[0])) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    ring = shared + (warp * kRows * 32 + lane) * 16;
    at = p.in + tile.sample * p.in_stride[0] + plane * p.in_stride[1];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int h = (warp * kRows + i) * 8 + lane / 4;
      const int w = p.inputs[1].take_digit(h) + tile.first[2] - p.reach[2];
      lies_inside[i] = h < p.inputs[0].value();
      h += tile.first[1] - p.reach[1];
      lies_inside[i] &= static_cast<unsigned>(h) < static_cast<unsigned>(p.in_size[1]) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(p.in_size[2]);
      offset[i] = static_cast<int>(h * p.in_stride[2] + w * p.in_stride[3]) + lane % 4 * 16;
    }
  }
  /// Starts to copy the next chunk, or zeros after the last one.
  __device__ void copy() {
    const int from = chunk * kFewOutputsChunk + static_cast<int>(threadIdx.x) % 4 * 16;
    const bool some = plane >= 0 && plane < end && from < p.in_channels * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kRows; ++i) cp_async(ring + written + i * 512, at + offset[i], some && lies_inside[i]);
    cp_async_commit();
    written = written == (kStages - 1) * kStageBytes ? 0 : written + kStageBytes;
    at += kFewOutputsChunk;
    if (++chunk < p.chunks) return;
    chunk = 0;
    ++plane;
    at += p.next_plane;
  }
  /// Waits for the next chunk and loads its fragments: of each m64 tile for two k-steps.
  __device__ void load(uint32_t (&a)[kRows / 2][2][4]) {
    cp_async_wait<kStages - 2>();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t word[4];
      load_shared(ring + read + i * 512, word);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[i / 2][j / 2][i % 2 + j % 2 * 2] =
            sizeof(T) == 4 ? round_for_tensor_cores(__uint_as_float(word[j])) : word[j];
    }
    read = read == (kStages - 1) * kStageBytes ? 0 : read + kStageBytes;
  }
};

}  // namespace voxgrad::cuda
