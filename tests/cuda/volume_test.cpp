// CUDA's softmax, pooling and resampling against the CPU's: all floating dtypes, layouts and alignments.
#include "tests/cuda/random_view.h"

namespace voxgrad {
namespace {

using namespace cudatest;

constexpr DType kFloats[] = {f32, f64, bf16, f16};
constexpr Device kBoth[] = {Device::cpu(), Device::cuda()};
constexpr Layout kLayouts[] = {Layout::contiguous, Layout::channels_last, Layout::spaced};
constexpr unsigned kSeeds = 12;  // one in four of contiguous arrays is aligned for vectors

/// Of results that are rounded from float32 sums whose order differs.
double rounding(DType dtype) { return dtype == f64 ? 1e-13 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 4e-6; }

class CudaVolume : public OnGpu {};

TEST_F(CudaVolume, Softmax) {
  const struct {
    Shape shape;
    int axis;
  } cases[] = {{{2, 3, 4, 4, 8}, 1},   {{2, 16, 2, 4, 8}, 1}, {{1, 40, 3, 5, 7}, 1}, {{3, 64, 8}, 1}, {{2, 300, 16}, 1},
               {{1, 2000, 8}, 1},      {{5, 24}, 1},          {{3, 1000}, 1},        {{2, 7168}, 1},  {{1, 20000}, 1},
               {{2, 5, 3, 4, 129}, 4}, {{16, 3, 24}, 0},      {{2, 4, 4, 8, 8}, 2},  {{7, 1}, 1}};
  for (const DType dtype : kFloats)
    for (const auto& [shape, axis] : cases)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + kSeeds; ++seed) {
        Random random(seed);
        const bool logarithm = random.chance(0.5);
        RandomView x(dtype, shape, any_layout(random, true), random),
            y(dtype, shape, any_layout(random, false), random);
        if (random.chance(0.7)) {  // one layout for both, as the operator has it
          const Layout layout = kLayouts[random.integer(0, 1)];
          x = RandomView(dtype, shape, layout, random);
          y = RandomView(dtype, shape, layout, random);
        }
        x.fill(random, -20, 20, false);
        y.poison();
        for (const Device device : kBoth) kernels(device).softmax(y.on(device), x.on(device), axis, logarithm);
        EXPECT_TRUE(y.same(rounding(dtype))) << dtype << ' ' << shape << " axis " << axis << " seed " << seed;
      }
}

TEST_F(CudaVolume, MaxPoolAndItsGradient) {
  const PoolGeometry geometries[] = {
      {2, 2, 0, 1}, {2, 2, 1, 1}, {2, 1, 0, 2}, {3, 2, 1, 1}, {{1, 3, 2}, {2, 1, 3}, {0, 1, 0}, 1}};
  for (const DType dtype : kFloats)
    for (const PoolGeometry& g : geometries)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2 * kSeeds; ++seed) {
        Random random(seed);
        const Shape in{random.integer(1, 2), random.integer(1, 3) * (seed % 2 ? 8 : 1), 7, 6, 9};
        Shape out = in;
        for (int i = 0; i < 3; ++i)
          out[i + 2] = (in[i + 2] + 2 * g.padding[i] - g.dilation[i] * (g.kernel_size[i] - 1) - 1) / g.stride[i] + 1;
        const Layout layout = kLayouts[random.integer(0, 2)];
        const DType index = random.chance(0.5) ? i32 : i64;
        RandomView x(dtype, in, layout, random), y(dtype, out, layout, random), indices(index, out, layout, random);
        RandomView dy(dtype, out, layout, random), dx(dtype, in, layout, random), alone(dtype, out, layout, random);
        x.fill(random, -4, 4);  // with ties
        x.cpu.set({x.start}, std::numeric_limits<double>::quiet_NaN());
        x.gpu = x.cpu.to(Device::cuda());
        dy.fill(random, -4, 4, false);
        for (RandomView* result : {&y, &dx, &alone}) result->poison();
        indices.fill(random, 0, 0);
        for (const Device device : kBoth) {
          const View named = indices.on(device);
          kernels(device).max_pool(y.on(device), &named, x.on(device), g);
          kernels(device).max_pool(alone.on(device), nullptr, x.on(device), g);
          kernels(device).max_pool_backward(dx.on(device), dy.on(device), named, g);
        }
        for (const RandomView* result : {&y, &indices, &alone})
          EXPECT_TRUE(result->same(0)) << dtype << " seed " << seed;
        EXPECT_TRUE(dx.same(rounding(dtype))) << dtype << " seed " << seed;
      }
}

TEST_F(CudaVolume, Resample) {
  using enum Resample::Mode;
  const struct {
    Resample map;
    int64_t inputs, outputs;
  } cases[] = {{{.mode = nearest, .scale = 0.5}, 7, 14},
               {{.mode = linear, .scale = 0.5}, 7, 14},
               {{.mode = linear, .scale = 7.0 / 3}, 7, 3},
               {{.mode = linear, .align_corners = true, .scale = 0.5}, 7, 13},
               {{.mode = box, .kernel = 2, .stride = 2}, 8, 4},
               {{.mode = box, .count_include_pad = false, .kernel = 3, .stride = 2, .padding = 1}, 8, 5}};
  for (const DType dtype : kFloats)
    for (const auto& [map, inputs, outputs] : cases)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2 * kSeeds; ++seed) {
        Random random(seed);
        const int axis = static_cast<int>(random.integer(2, 4));
        const bool transposed = random.chance(0.5);
        Shape from{2, seed % 2 ? 16 : 3, 4, 5, 8}, to = from;
        from[axis] = transposed ? outputs : inputs;
        to[axis] = transposed ? inputs : outputs;
        const Layout layout = kLayouts[random.integer(0, 2)];
        RandomView in(dtype, from, layout, random), out(dtype, to, layout, random);
        in.fill(random, -4, 4, false);
        out.poison();
        for (const Device device : kBoth)
          kernels(device).resample(out.on(device), in.on(device), axis, map, transposed);
        EXPECT_TRUE(out.same(rounding(dtype))) << dtype << " axis " << axis << " seed " << seed;
      }
}

}  // namespace
}  // namespace voxgrad
