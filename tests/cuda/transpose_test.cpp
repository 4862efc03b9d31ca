// Tests CUDA copies between layouts with different innermost axes against the CPU: both directions, all element sizes
// and conversions, any alignment, padded voxels, and guard values that must not change.
#include <utility>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/cuda/random_view.h"

namespace voxgrad {
namespace {

using namespace cudatest;

/// Pairs of (dtype of the copy, dtype of the source).
constexpr std::pair<DType, DType> kTypes[] = {{f32, f32},  {f64, f64}, {bf16, bf16}, {u8, u8},    {f32, bf16},
                                              {bf16, f32}, {f32, f16}, {f16, f32},   {f16, bf16}, {i32, i32},
                                              {i64, i64},  {f64, f32}};  // f32 to f64 has no tiled kernel
/// Pairs of (layout of the copy, layout of the source).
constexpr std::pair<Layout, Layout> kDirections[] = {
    {Layout::channels_last, Layout::contiguous},        {Layout::contiguous, Layout::channels_last},
    {Layout::dense_channels_last, Layout::contiguous},  {Layout::contiguous, Layout::dense_channels_last},
    {Layout::padded_channels_last, Layout::contiguous}, {Layout::contiguous, Layout::padded_channels_last},
    {Layout::channels_last, Layout::flipped},           {Layout::spaced, Layout::contiguous}};
const Shape kShapes[] = {{2, 1, 4, 8, 24},  {2, 2, 5, 10, 24}, {2, 3, 4, 8, 40},   {1, 3, 7, 9, 55},  {2, 4, 6, 8, 16},
                         {3, 8, 4, 8, 16},  {1, 12, 8, 8, 16}, {2, 13, 5, 7, 11},  {1, 32, 4, 8, 16}, {2, 64, 3, 8, 8},
                         {1, 65, 3, 5, 13}, {1, 100, 4, 6, 8}, {1, 300, 1, 5, 17}, {40, 24, 3, 3, 3}, {3, 200, 1, 1, 2},
                         {2, 48, 7, 7, 7},  {5, 130, 27},      {150, 200},         {2, 0, 4, 8, 8}};

class CudaKernelsTranspose : public OnGpu {};

void expect_same_copies(DType to, DType from, const Shape& shape, unsigned seed) {
  for (const auto& [after, before] : kDirections) {
    Random random(seed);
    RandomView in(from, shape, before, random), out(to, shape, after, random);
    const bool real = is_floating(from) && is_floating(to);
    in.fill(random, from == u8 ? 0 : -100, 100, !real);
    if (is_floating(to))
      out.poison();
    else
      out.fill(random, 0, 0);
    for (const Device device : {Device::cpu(), Device::cuda()}) kernels(device).copy(out.on(device), in.on(device));
    EXPECT_TRUE(out.matches_cpu(0)) << from << " to " << to << ' ' << shape << ", layout " << static_cast<int>(before)
                                    << " to " << static_cast<int>(after) << ", seed " << seed;
  }
}

TEST_F(CudaKernelsTranspose, HandlesAnyLayoutAndAlignment) {
  for (const auto& [to, from] : kTypes)
    for (const Shape& shape : kShapes)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2; ++seed) expect_same_copies(to, from, shape, seed);
}

// The number of channels determines the tile size. Every copy launches more CTAs than fit on the GPU at once.
TEST_F(CudaKernelsTranspose, HandlesTilesOfEverySize) {
  const Device gpu = Device::cuda();
  for (const DType dtype : {u8, bf16, f32, f64})
    for (const int64_t channels : {2, 3, 5, 8, 12, 31, 64, 128, 250, 520}) {
      const Tensor x = (rand({2, channels, 40'000'000 / channels / 1024, 32, 32}, {.device = gpu}) * 200).to(dtype);
      const Tensor last = x.contiguous(MemoryFormat::channels_last);
      const auto mismatches = [&](const Tensor& y) { return sum(ne(x, y)).item<int64_t>(); };
      EXPECT_EQ(mismatches(last), 0) << dtype << ", " << channels << " channels";
      EXPECT_EQ(mismatches(last.contiguous(MemoryFormat::contiguous)), 0) << dtype << ", " << channels << " channels";
    }
}

}  // namespace
}  // namespace voxgrad
