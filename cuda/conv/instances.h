// The compiled tiles of the tensor-core convolutions, each with the number of its launches: tests see to it that there
// is none that they did not run.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "cuda/conv/plan.h"

namespace voxgrad::cuda {

struct ConvInstance {
  /// Joins the list; for objects that are never destroyed.
  ConvInstance(ConvPass of_pass, ConvKernel which, ConvArithmetic of, int tile_width, int tile_rows,
               int of_multiprocessor);

  ConvPass pass;  // fprop: of dgrad, too
  ConvKernel kernel;
  ConvArithmetic arithmetic;
  int width, rows, blocks;  // rows, and blocks of a multiprocessor (or bytes of a row): of kernels that name them
  std::atomic<int64_t> launches = 0;
};

template <class Arithmetic>
constexpr ConvArithmetic arithmetic_kind() {
  if (Arithmetic::kElements == 1) return Arithmetic::kParts == 1 ? ConvArithmetic::tf32 : ConvArithmetic::tf32x3;
  return std::is_same_v<typename Arithmetic::Element, BFloat16> ? ConvArithmetic::bf16 : ConvArithmetic::f16;
}

/// The instance of a tile: whoever compiles a launch of it makes it exist, from the program's start.
template <class Tile, ConvPass kPass, int kWidth>
inline ConvInstance mma_sync_instance{
    kPass, ConvKernel::mma_sync, arithmetic_kind<typename Tile::Arithmetic>(), kWidth, 0, 0};
template <class Tile, ConvPass kPass>
inline ConvInstance small_channel_instance{
    kPass, ConvKernel::small_channel, Tile::kArithmetic, Tile::kColumns, Tile::kRows, Tile::kBlocks};

/// All that this program holds.
const std::vector<ConvInstance*>& conv_instances();

}  // namespace voxgrad::cuda
