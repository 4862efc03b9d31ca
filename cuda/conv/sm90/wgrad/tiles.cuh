// The compiled CTA tiles (plan/sm90_wgrad.cpp) of one element type.
#pragma once

#include "cuda/conv/plan/instances.h"
#include "cuda/conv/sm90/wgrad/kernel.cuh"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda::implicit_wgrad {

template <class Tile>
inline ConvInstance instance{ConvPass::wgrad,
                             ConvKernel::wgrad,
                             Tile::kPromotes                                    ? ConvArithmetic::tf32x3
                             : std::is_same_v<typename Tile::Element, BFloat16> ? ConvArithmetic::bf16
                                                                                : ConvArithmetic::f16,
                             Tile::kN* Tile::kSlide,
                             Tile::kMTiles,
                             Tile::kChunk};

/// Launches the kernel of a tile. kPromotes selects the tiles for three products.
template <class Element, bool kPromotes>
void launch_kernel(const Params& p, const WgradTile& tile, int ctas, int cluster, int shared_bytes,
                   cudaStream_t stream) {
  const auto run = [&]<int kChunk, int kN, int kMTiles, int kSlide = 1>() {
    using Tile = CtaTile<Element, kChunk, kN, kMTiles, kSlide, kPromotes>;
    if (tile.chunk != kChunk || tile.columns != kN || tile.m_tiles != kMTiles || tile.slide != kSlide) return;
    ++instance<Tile>.launches;
    launch_with_shared(wgrad_kernel<Tile>, static_cast<unsigned>(ctas), Tile::kThreads, shared_bytes, stream, p,
                       static_cast<unsigned>(cluster));
  };
  if constexpr (kPromotes) {
    run.template operator()<64, 64, 4>();
    run.template operator()<64, 32, 6>();
    run.template operator()<32, 32, 6>();
  } else {
    run.template operator()<64, 64, 5>();
    run.template operator()<64, 64, 3>();
    run.template operator()<64, 32, 7>();
    run.template operator()<32, 64, 5>();
    run.template operator()<32, 32, 7>();
    run.template operator()<32, 32, 3, 3>();
  }
}

}  // namespace voxgrad::cuda::implicit_wgrad
