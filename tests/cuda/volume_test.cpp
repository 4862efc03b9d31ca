// Tests CUDA softmax, pooling, resampling and grid sampling against the CPU, with all floating-point dtypes, layouts
// and alignments.
#include "ops/grid_sample.h"
#include "tests/cuda/random_view.h"

namespace voxgrad {
namespace {

using namespace cudatest;

constexpr DType kFloats[] = {f32, f64, bf16, f16};
constexpr Device kBoth[] = {Device::cpu(), Device::cuda()};
constexpr Layout kLayouts[] = {Layout::contiguous, Layout::channels_last, Layout::spaced};
constexpr unsigned kSeeds = 12;  // several, because only a quarter of contiguous views is aligned for vector loads

/// Returns the relative tolerance for results of `dtype`, whose sums the devices compute in different orders and then
/// round.
double rounding(DType dtype) { return dtype == f64 ? 1e-13 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 4e-6; }

class CudaVolume : public OnGpu {};

TEST_F(CudaVolume, SoftmaxMatchesCpu) {
  const struct {
    Shape shape;
    int axis;
  } cases[] = {{{2, 3, 4, 4, 8}, 1}, {{2, 16, 2, 4, 8}, 1}, {{1, 40, 3, 5, 7}, 1},  {{3, 64, 8}, 1},
               {{2, 300, 16}, 1},    {{1, 2000, 8}, 1},     {{5, 24}, 1},           {{3, 1000}, 1},
               {{2, 7168}, 1},       {{1, 20000}, 1},       {{2, 5, 3, 4, 129}, 4}, {{16, 3, 24}, 0},
               {{2, 4, 4, 8, 8}, 2}, {{7, 1}, 1},           {{2, 128, 3, 4, 8}, 1}, {{3, 500, 22}, 1}};
  for (const DType dtype : kFloats)
    for (const auto& [shape, axis] : cases)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + kSeeds; ++seed) {
        Random random(seed);
        const bool logarithm = random.chance(0.5);
        RandomView x(dtype, shape, any_layout(random, true), random),
            y(dtype, shape, any_layout(random, false), random);
        if (random.chance(0.7)) {  // the same layout for input and output, as in the operator
          const Layout layout = kLayouts[random.integer(0, 1)];
          x = RandomView(dtype, shape, layout, random);
          y = RandomView(dtype, shape, layout, random);
        }
        x.fill(random, -20, 20, false);
        y.poison();
        for (const Device device : kBoth) kernels(device).softmax(y.on(device), x.on(device), axis, logarithm);
        EXPECT_TRUE(y.matches_cpu(rounding(dtype))) << dtype << ' ' << shape << " axis " << axis << " seed " << seed;
      }
}

TEST_F(CudaVolume, MaxPoolAndGradientMatchCpu) {
  // The columns are the kernel size, the stride, the padding and the dilation.
  const PoolGeometry geometries[] = {{2, 2, 0, 1},
                                     {2, 2, 1, 1},
                                     {2, 1, 0, 2},
                                     {3, 2, 1, 1},
                                     {2, 3, 1, 1},
                                     {1, 2, 0, 1},
                                     {{1, 2, 2}, {1, 2, 2}, 0, 1},
                                     {{1, 3, 2}, {2, 1, 3}, {0, 1, 0}, 1}};
  for (const DType dtype : kFloats)
    for (const PoolGeometry& g : geometries)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2 * kSeeds; ++seed) {
        Random random(seed);
        const Shape in{random.integer(1, 2), random.integer(1, 3) * (seed % 2 ? 8 : 1), 7, random.integer(6, 13),
                       random.integer(7, 16)};
        Shape out = in;
        for (int i = 0; i < 3; ++i)
          out[i + 2] = (in[i + 2] + 2 * g.padding[i] - g.dilation[i] * (g.kernel_size[i] - 1) - 1) / g.stride[i] + 1;
        const Layout layout = kLayouts[random.integer(0, 2)];
        const DType index = random.chance(0.5) ? i32 : i64;
        RandomView x(dtype, in, layout, random), y(dtype, out, layout, random), indices(index, out, layout, random);
        RandomView dy(dtype, out, layout, random), dx(dtype, in, layout, random),
            y_without_indices(dtype, out, layout, random);
        x.fill(random, -4, 4);  // with ties
        x.cpu.set({x.start}, std::numeric_limits<double>::quiet_NaN());
        x.gpu = x.cpu.to(Device::cuda());
        dy.fill(random, -4, 4, false);
        for (RandomView* result : {&y, &dx, &y_without_indices}) result->poison();
        indices.fill(random, 0, 0);
        for (const Device device : kBoth) {
          const View index_view = indices.on(device);
          kernels(device).max_pool(y.on(device), &index_view, x.on(device), g);
          kernels(device).max_pool(y_without_indices.on(device), nullptr, x.on(device), g);
          kernels(device).max_pool_backward(dx.on(device), dy.on(device), index_view, g);
        }
        for (const RandomView* result : {&y, &indices, &y_without_indices})
          EXPECT_TRUE(result->matches_cpu(0)) << dtype << " seed " << seed;
        EXPECT_TRUE(dx.matches_cpu(rounding(dtype))) << dtype << " seed " << seed;
      }
}

TEST_F(CudaVolume, ResampleMatchesCpu) {
  using enum Resample::Mode;
  const struct {
    Resample map;
    int64_t inputs, outputs;
  } cases[] = {{{}, 4, 4},
               {{.mode = nearest, .scale = 0.5}, 8, 16},
               {{.mode = nearest_exact, .scale = 7.0 / 5}, 7, 5},
               {{.mode = linear, .scale = 0.5}, 8, 16},
               {{.mode = linear, .scale = 7.0 / 3}, 7, 3},
               {{.mode = linear, .align_corners = true, .scale = 0.5}, 5, 9},
               {{.mode = cubic, .scale = 0.5}, 4, 8},
               {{.mode = box, .kernel = 2, .stride = 2}, 16, 8},
               {{.mode = box, .kernel = 3, .stride = 2, .padding = 1}, 8, 4},
               {{.mode = box, .count_include_pad = false, .kernel = 3, .stride = 2, .padding = 1}, 8, 5},
               {{.mode = box, .kernel = 7, .stride = 1}, 12, 6},
               {{.mode = adaptive, .count_include_pad = false, .outputs = 3}, 8, 3},
               {{.mode = reflect, .padding = 2}, 4, 8},
               {{.mode = replicate, .padding = 3}, 3, 8},
               {{.mode = circular, .padding = 1}, 6, 8}};
  constexpr size_t kCases = std::size(cases);
  for (const DType dtype : kFloats)
    for (size_t number = 0; number < kCases; ++number)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2 * kSeeds; ++seed) {
        Random random(seed);
        const bool transposed = random.chance(0.5);
        Shape from{2, seed % 2 ? 16 : 3, 1, 1, 1}, to = from;
        ResampleMaps maps;
        for (int i = 0; i < 3; ++i) {  // this case along the width, random cases along the other axes
          const auto& c = cases[i == 2 ? number : static_cast<size_t>(random.integer(0, kCases - 1))];
          maps[static_cast<size_t>(i)] = c.map;
          from[i + 2] = transposed ? c.outputs : c.inputs;
          to[i + 2] = transposed ? c.inputs : c.outputs;
        }
        const Layout layout = kLayouts[random.integer(0, 2)];
        RandomView in(dtype, from, layout, random), out(dtype, to, layout, random);
        in.fill(random, -4, 4, false);
        out.poison();
        for (const Device device : kBoth) kernels(device).resample(out.on(device), in.on(device), maps, transposed);
        EXPECT_TRUE(out.matches_cpu(rounding(dtype))) << dtype << ' ' << from << " to " << to << " seed " << seed;
      }
}

// Doubles or halves the size of all axes, or of all axes except the depth.
TEST_F(CudaVolume, ResampleByTwoMatchesCpu) {
  using enum Resample::Mode;
  const Resample by_two[] = {{.mode = nearest, .scale = 0.5},
                             {.mode = linear, .scale = 0.5},
                             {.mode = box, .kernel = 2, .stride = 2},
                             {.mode = box, .kernel = 2, .stride = 2, .weight = 0.75}};
  for (const DType dtype : kFloats)
    for (const Resample& map : by_two)
      for (unsigned seed = kFirstSeed; seed < kFirstSeed + 4 * kSeeds; ++seed) {
        Random random(seed);
        const bool transposed = random.chance(0.5), depth = random.chance(0.7), up = (map.mode == box) == transposed;
        Shape small{random.integer(1, 2), random.integer(1, 2) * (seed % 2 ? 8 : 1), random.integer(1, 5),
                    random.integer(1, 40), random.integer(1, 20)};
        Shape large = small;
        ResampleMaps maps;
        if (map.mode == box) maps[0] = {.mode = box, .weight = map.weight};
        for (int i = depth ? 0 : 1; i < 3; ++i) {
          maps[static_cast<size_t>(i)] = map;
          large[i + 2] *= 2;
        }
        const Layout layout = kLayouts[random.integer(0, 2)];
        RandomView in(dtype, up ? small : large, layout, random), out(dtype, up ? large : small, layout, random);
        in.fill(random, -4, 4, false);
        out.poison();
        for (const Device device : kBoth) kernels(device).resample(out.on(device), in.on(device), maps, transposed);
        EXPECT_TRUE(out.matches_cpu(rounding(dtype)))
            << dtype << ' ' << small << (up ? " doubled" : " halved") << " seed " << seed;
      }
}

// Covers rows that do not fit into shared memory, and partial tiles.
TEST_F(CudaVolume, ResampleMatchesCpuForLongAndManyRows) {
  const Resample up{.mode = Resample::Mode::linear, .scale = 0.5};
  for (const DType dtype : kFloats)
    for (const auto& [shape, axis] : {std::pair(Shape{1, 2, 1, 3, 5000}, 4), std::pair(Shape{3, 7, 9, 11, 8}, 2),
                                      std::pair(Shape{2, 5, 7, 3, 64}, 4), std::pair(Shape{2, 5, 7, 3, 300}, 3)})
      for (const bool transposed : {false, true}) {
        Random random(kFirstSeed);
        ResampleMaps maps;
        maps[static_cast<size_t>(axis - 2)] = up;
        Shape to = shape;
        to[axis] *= 2;
        RandomView in(dtype, transposed ? to : shape, Layout::contiguous, random);
        RandomView out(dtype, transposed ? shape : to, Layout::contiguous, random);
        in.fill(random, -4, 4, false);
        out.poison();
        for (const Device device : kBoth) kernels(device).resample(out.on(device), in.on(device), maps, transposed);
        EXPECT_TRUE(out.matches_cpu(rounding(dtype))) << dtype << ' ' << shape << (transposed ? " transposed" : "");
      }
}

TEST_F(CudaVolume, GridSampleAndGradientsMatchCpu) {
  for (const DType dtype : kFloats)
    for (unsigned seed = kFirstSeed; seed < kFirstSeed + 2 * kSeeds; ++seed) {
      Random random(seed);
      const int64_t n = random.integer(1, 3), channels = random.integer(1, 3) * (seed % 2 ? 8 : 1);
      const Shape size{n, channels, random.integer(1, 6), 5, 7}, to{n, channels, 3, random.integer(1, 9), 11};
      const Layout layout = kLayouts[random.integer(0, 2)];
      const DType wide = dtype == f64 ? f64 : f32;
      const Shape grid_shape{n, to[2], to[3], to[4], 3};
      RandomView x(dtype, size, layout, random), y(dtype, to, layout, random), dx(dtype, size, layout, random);
      RandomView dy(dtype, to, layout, random), grid(wide, grid_shape, Layout::spaced, random);
      RandomView dgrid(wide, grid_shape, Layout::contiguous, random);
      const GridSampleOptions options{random.chance(0.3), static_cast<GridSampleOptions::Padding>(random.integer(0, 2)),
                                      random.chance(0.5)};
      x.fill(random, -4, 4, false);
      dy.fill(random, -4, 4, false);
      grid.fill(random, -1.7, 1.7, false);
      for (RandomView* result : {&y, &dx, &dgrid}) result->poison();
      for (const Device device : kBoth) {
        kernels(device).grid_sample(y.on(device), x.on(device), grid.on(device), options);
        const View to_x = dx.on(device), to_grid = dgrid.on(device);
        kernels(device).grid_sample_backward(&to_x, &to_grid, dy.on(device), x.on(device), grid.on(device), options);
      }
      for (const RandomView* result : {&y, &dx, &dgrid})
        EXPECT_TRUE(result->matches_cpu(4 * rounding(result == &dgrid ? wide : dtype)))
            << dtype << " nearest " << options.nearest << " padding " << static_cast<int>(options.padding_mode)
            << " seed " << seed;
    }
}

// All positions read the same voxel. The first gradient is ordinary, huge, tiny or NaN.
TEST_F(CudaVolume, GridSampleGradientMatchesCpuForManyPositionsAndNaN) {
  Random random(kFirstSeed);
  for (const double first : {1.0, 1e30, 1e-38, std::numeric_limits<double>::quiet_NaN()}) {
    RandomView x(f32, {1, 1, 1, 1, 2}, Layout::contiguous, random),
        dx(f32, {1, 1, 1, 1, 2}, Layout::contiguous, random);
    RandomView dy(f32, {1, 1, 1, 1, 10000}, Layout::contiguous, random);
    RandomView grid(f32, {1, 1, 1, 10000, 3}, Layout::contiguous, random);
    dx.poison();
    x.fill(random, 0, 0);
    grid.fill(random, 0, 0);
    dy.fill(random, 1, 1);
    dy.cpu.set({dy.start}, first);
    dy.gpu = dy.cpu.to(Device::cuda());
    for (const Device device : kBoth) {
      const View to = dx.on(device);
      kernels(device).grid_sample_backward(&to, nullptr, dy.on(device), x.on(device), grid.on(device), {});
    }
    EXPECT_TRUE(dx.matches_cpu(1e-6)) << first;
  }
}

}  // namespace
}  // namespace voxgrad
