// The compiled tiles of the tensor core convolutions, with counters of their launches. Tests use the counters to check
// that they ran every tile.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// One compiled tile of a kernel. Objects are never destroyed.
struct ConvInstance {
  /// Adds the instance to conv_instances().
  ConvInstance(ConvPass conv_pass, ConvKernel conv_kernel, ConvArithmetic conv_arithmetic, int tile_width,
               int tile_rows, int tile_blocks);

  ConvPass pass;  ///< wgrad, or fprop for kernels that compute fprop and dgrad
  ConvKernel kernel;
  ConvArithmetic arithmetic;
  /// fprop_dgrad and wgrad: columns of the product. mma_sync for the weight gradient: rows of the tile. Otherwise
  /// columns of the tile.
  int width;
  /// fprop_dgrad and wgrad: m64 tiles of a warpgroup. multistage_wgrad, and small_channel for fprop and dgrad: rows of
  /// the tile. Otherwise 0.
  int rows;
  /// fprop_dgrad: bytes of a row in shared memory. wgrad: input channels of a row of x. small_channel for fprop and
  /// dgrad: CTAs per SM. Otherwise 0.
  int blocks;
  std::atomic<int64_t> launches = 0;
};

/// Returns the ConvArithmetic of an arithmetic class of cuda/conv/common/arithmetic.cuh.
template <class Arithmetic>
constexpr ConvArithmetic arithmetic_kind() {
  if (Arithmetic::kElements == 1) return Arithmetic::kParts == 1 ? ConvArithmetic::tf32 : ConvArithmetic::tf32x3;
  return std::is_same_v<typename Arithmetic::Element, BFloat16> ? ConvArithmetic::bf16 : ConvArithmetic::f16;
}

/// The instances of the tiles outside of sm90/. Compiling a launch of a tile instantiates its variable, which is
/// initialized when the program starts.
template <class Tile, ConvPass kPass, int kWidth>
inline ConvInstance mma_sync_instance{
    kPass, ConvKernel::mma_sync, arithmetic_kind<typename Tile::Arithmetic>(), kWidth, 0, 0};
template <class Cta>
inline ConvInstance multistage_instance{ConvPass::wgrad,
                                        ConvKernel::multistage_wgrad,
                                        arithmetic_kind<typename Cta::Arithmetic>(),
                                        Cta::kColumns,
                                        Cta::kRows,
                                        0};
template <class Tile, ConvPass kPass>
inline ConvInstance small_channel_instance{
    kPass, ConvKernel::small_channel, Tile::kArithmetic, Tile::kColumns, Tile::kRows, Tile::kBlocks};

/// Returns all instances in this program.
const std::vector<ConvInstance*>& conv_instances();

}  // namespace voxgrad::cuda
