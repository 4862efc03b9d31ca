// The compiled CTA tiles (plan/sm90_fprop_dgrad.h) of one element type.
#pragma once

#include "cuda/conv/plan/instances.h"
#include "cuda/conv/sm90/fprop_dgrad/kernel.cuh"
#include "cuda/conv/sm90/fprop_dgrad/launch.h"

namespace voxgrad::cuda::implicit_gemm {

template <class Tile>
inline ConvInstance instance{ConvPass::fprop,
                             ConvKernel::fprop_dgrad,
                             Tile::kThree                                       ? ConvArithmetic::tf32x3
                             : sizeof(typename Tile::Element) == 4              ? ConvArithmetic::tf32
                             : std::is_same_v<typename Tile::Element, BFloat16> ? ConvArithmetic::bf16
                                                                                : ConvArithmetic::f16,
                             Tile::kN* Tile::kSlide,
                             Tile::kTiles,
                             Tile::kRowBytes};

template <class Tile>
void launch_tile(const Params& p, int ctas, int shared_bytes, cudaStream_t stream) {
  ++instance<Tile>.launches;
  launch_with_shared(fprop_dgrad_kernel<Tile>, static_cast<unsigned>(ctas), Tile::kThreads, shared_bytes, stream, p,
                     static_cast<unsigned>(p.cluster));
}

template <class Element, bool kThree, bool kNMajor>
void launch_major(const Params& p, const FpropDgradTile& tile, int ctas, int shared_bytes, cudaStream_t stream) {
  const auto run = [&]<int i, int kRowBytes>() {
    constexpr CompiledFpropDgradTile compiled = kFpropDgradTiles[i];
    constexpr FpropDgradTile own = compiled.tile;
    if constexpr (compiled.has(kRowBytes, sizeof(Element), kThree) && (!kNMajor || may_be_n_major(own.columns)))
      if (tile == own && p.row_bytes == kRowBytes)
        launch_tile<CtaTile<Element, own.columns, own.row_tiles, own.slide, kRowBytes, kNMajor, kThree>>(
            p, ctas, shared_bytes, stream);
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (run.template operator()<i, 32>(), ...);
    (run.template operator()<i, 64>(), ...);
    (run.template operator()<i, 128>(), ...);
  }
  (std::make_integer_sequence<int, std::size(kFpropDgradTiles)>());
}

template <class Element, bool kThree>
void launch_kernel(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas, int shared_bytes,
                   cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2)
    if (n_major) return launch_major<Element, kThree, true>(p, tile, ctas, shared_bytes, stream);
  launch_major<Element, kThree, false>(p, tile, ctas, shared_bytes, stream);
}

}  // namespace voxgrad::cuda::implicit_gemm
