// The compiled CTA tiles (plan.cpp) of one element type.
#pragma once

#include "cuda/conv/fprop_dgrad/kernel.cuh"
#include "cuda/conv/fprop_dgrad/launch.h"
#include "cuda/conv/instances.h"

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
  launch_with_shared(fprop_dgrad_kernel<Tile>, static_cast<unsigned>(ctas), Tile::kThreads, shared_bytes, stream, p);
}

template <class Element, bool kThree, bool kNMajor>
void launch_major(const Params& p, const FpropDgradTile& tile, int ctas, int shared_bytes, cudaStream_t stream) {
  const auto run = [&]<int kN, int kTiles, int kSlide, int kRowBytes>() {
    if constexpr (is_compiled(kN, kTiles, kSlide, kRowBytes, sizeof(Element), kThree) &&
                  (!kNMajor || may_be_n_major(kN)))
      if (tile == FpropDgradTile{kN, kTiles, kSlide} && p.row_bytes == kRowBytes)
        launch_tile<CtaTile<Element, kN, kTiles, kSlide, kRowBytes, kNMajor, kThree>>(p, ctas, shared_bytes, stream);
  };
  const auto run_rows = [&]<int kN, int kTiles, int kSlide = 1>() {
    run.template operator()<kN, kTiles, kSlide, 128>();
    run.template operator()<kN, kTiles, kSlide, 64>();
    run.template operator()<kN, kTiles, kSlide, 32>();
  };
  run_rows.template operator()<16, 4>();
  run_rows.template operator()<24, 4>();
  run_rows.template operator()<32, 4>();
  run_rows.template operator()<48, 4>();
  run_rows.template operator()<48, 2>();
  run_rows.template operator()<64, 4>();
  run_rows.template operator()<64, 2>();
  run_rows.template operator()<64, 1>();
  run_rows.template operator()<128, 2>();
  run_rows.template operator()<128, 1>();
  run_rows.template operator()<16, 4, 3>();
  run_rows.template operator()<24, 2, 3>();
  run_rows.template operator()<32, 2, 3>();
  run_rows.template operator()<32, 4, 3>();
  run_rows.template operator()<48, 2, 3>();
}

template <class Element, bool kThree>
void launch_kernel(const Params& p, const FpropDgradTile& tile, bool n_major, int ctas, int shared_bytes,
                   cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2)
    if (n_major) return launch_major<Element, kThree, true>(p, tile, ctas, shared_bytes, stream);
  launch_major<Element, kThree, false>(p, tile, ctas, shared_bytes, stream);
}

}  // namespace voxgrad::cuda::implicit_gemm
