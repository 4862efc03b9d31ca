// The CUDA kernels that reduce, normalise, pool and resample against the CPU's, through the kernel table: random
// shapes and strides, poisoned results between guard bands.
#include <functional>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using CudaReduce = OnGpu;

constexpr Device kBoth[] = {Device::cpu(), Device::cuda()};

double rounding(DType dtype) { return dtype == f64 ? 1e-12 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 1e-6; }

/// Calls body(random, dtype) with many seeds, naming the one that fails.
void with_seeds(unsigned count, const std::function<void(Random&, DType)>& body) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + count && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    Random random(seed);
    body(random, seed % 3 ? f32 : f64);
  }
}

/// The same with halves, too.
void with_all_floats(unsigned count, const std::function<void(Random&, DType)>& body) {
  with_seeds(count, [&](Random& random, DType dtype) {
    body(random, random.chance(0.5) ? dtype : random.chance(0.5) ? bf16 : f16);
  });
}

Shape random_shape(Random& random, int64_t rank, int64_t largest) {
  Shape shape;
  for (int64_t axis = 0; axis < rank; ++axis) shape.push_back(random.integer(1, largest));
  return shape;
}

TEST_F(CudaReduce, AgreesOverAnyAxes) {
  with_all_floats(150, [](Random& random, DType dtype) {
    const int64_t rank = random.integer(1, 6);
    const Shape shape = random_shape(random, rank, rank == 1 ? 100000 : rank == 2 ? 400 : rank < 5 ? 17 : 6);
    Shape kept = shape;
    for (int64_t& size : kept)
      if (random.chance(0.6)) size = 1;
    const auto op = static_cast<ReduceOp>(random.integer(0, 3));
    RandomView in(dtype, shape, any_layout(random, true), random), out(dtype, kept, any_layout(random, false), random);
    in.fill(random, -100, 100, false);
    out.poison();
    SCOPED_TRACE(concat(shape, " to ", kept));
    for (const Device device : kBoth) kernels(device).reduce(op, out.on(device), in.on(device));
    EXPECT_TRUE(out.same(op <= ReduceOp::mean ? rounding(dtype) : 0));
  });
}

TEST_F(CudaReduce, ReadsVectorsFromAnyAlignment) {
  const struct {
    Shape shape, kept;
  } cases[] = {
      {{100003}, {1}},                 // one row, in ranges
      {{3, 100001}, {3, 1}},           // rows, in ranges
      {{7, 40, 41}, {7, 1, 1}},        // a warp to each row
      {{33, 37}, {33, 1}},             // a few threads to each row
      {{2, 3, 30, 31}, {1, 3, 1, 1}},  // runs in step with nothing
      {{5, 3, 9000}, {1, 3, 1}},       // long runs, and ranges that end inside
      {{9, 4, 130}, {1, 1, 130}},      // columns, single
      {{9, 4, 132}, {1, 4, 132}},      // columns by vectors, where the base is aligned
      {{9000, 8}, {1, 8}},             // few columns, in ranges
      {{3, 1 << 19}, {1, 1 << 19}},    // a thread to each column
      {{3, (1 << 19) + 1}, {1, (1 << 19) + 1}},
  };
  with_seeds(9, [&](Random& random, DType dtype) {
    for (const auto& c : cases)
      for (const auto op : {ReduceOp::sum, ReduceOp::amax}) {
        RandomView in(dtype, c.shape, Layout::contiguous, random), out(dtype, c.kept, Layout::contiguous, random);
        in.fill(random, -100, 100, false);
        out.poison();
        SCOPED_TRACE(concat(c.shape, " to ", c.kept));
        for (const Device device : kBoth) kernels(device).reduce(op, out.on(device), in.on(device));
        EXPECT_TRUE(out.same(op == ReduceOp::sum ? rounding(dtype) : 0));
      }
  });
}

TEST_F(CudaReduce, SumsIntegersAndFindsNaN) {
  with_seeds(20, [](Random& random, DType) {
    for (const DType dtype : {i64, i32, u8, b8}) {
      RandomView in(dtype, {70, 300}, any_layout(random, true), random), out(i64, {70, 1}, Layout::spaced, random);
      in.fill(random, 0, dtype == b8 ? 1 : 255);
      out.fill(random, 0, 9);
      for (const Device device : kBoth) kernels(device).reduce(ReduceOp::sum, out.on(device), in.on(device));
      EXPECT_TRUE(out.same(0)) << dtype;
    }
    const Tensor x = randn({5000});
    x.set({random.integer(0, 4999)}, std::nan(""));
    const Tensor highest = empty({1}, {.device = Device::cuda()});
    cuda_kernels().reduce(ReduceOp::amax, highest.view_out(), x.to(Device::cuda()).view_in());
    EXPECT_TRUE(std::isnan(highest.item()));
  });
}

TEST_F(CudaReduce, SumsOfNothingAreZero) {
  const Tensor x = empty({3, 0, 2}, {.device = Device::cuda()}), y = full({3, 1, 2}, 7, x.options());
  cuda_kernels().reduce(ReduceOp::sum, y.view_out(), x.view_in());
  EXPECT_EQ(y.to_vector<double>(), std::vector<double>(6, 0));
}

TEST_F(CudaReduce, GivesTheSameBitsEveryTime) {
  const Tensor x = randn({2, 5, 40, 41, 42}).to(Device::cuda());
  std::vector<float> first;
  for (int run = 0; run < 20; ++run) {
    const Tensor y = empty({1, 5, 1, 1, 1}, x.options());
    cuda_kernels().reduce(ReduceOp::sum, y.view_out(), x.view_in());
    if (run == 0) first = y.to_vector<float>();
    ASSERT_EQ(y.to_vector<float>(), first) << "run " << run;
  }
}

TEST_F(CudaReduce, SoftmaxAgrees) {
  with_all_floats(60, [](Random& random, DType dtype) {
    const int64_t rank = random.integer(1, 5);
    const Shape shape = random_shape(random, rank, rank == 1 ? 5000 : rank == 2 ? 700 : 8);
    const int axis = static_cast<int>(random.integer(0, rank - 1));
    const bool logarithm = random.chance(0.5);
    RandomView x(dtype, shape, any_layout(random, true), random), y(dtype, shape, any_layout(random, false), random);
    x.fill(random, -9, 9, false);
    y.poison();
    SCOPED_TRACE(concat(shape, " along ", axis));
    for (const Device device : kBoth) kernels(device).softmax(y.on(device), x.on(device), axis, logarithm);
    EXPECT_TRUE(y.same(rounding(dtype)));
  });
}

/// Both passes on both devices. `start` places all tensors alike, so that vectors can be read.
void check_group_norm(Random& random, DType dtype, const Shape& shape, int64_t groups, Layout layout, double centre,
                      bool affine, bool together) {
  SCOPED_TRACE(concat(shape, ", ", groups, " groups about ", centre));
  const int64_t batch = shape[0], channels = shape[1];
  const auto volume = [&, seed = static_cast<unsigned>(random.integer(0, 1000))] {
    Random same(seed);
    return RandomView(dtype, shape, layout, together ? same : random);
  };
  RandomView x = volume(), dy = volume(), y = volume(), dx = volume();
  RandomView gamma(dtype, {channels}, Layout::spaced, random), beta(dtype, {channels}, Layout::spaced, random);
  RandomView mean(dtype, {batch, groups}, Layout::contiguous, random), rstd = RandomView(mean);
  RandomView dgamma(dtype, {channels}, Layout::contiguous, random), dbeta = RandomView(dgamma);
  x.fill(random, centre - 2, centre + 2, false);
  for (RandomView* input : {&dy, &gamma, &beta}) input->fill(random, -2, 2, false);
  rstd.cpu = rstd.cpu.clone();
  dbeta.cpu = dbeta.cpu.clone();
  for (RandomView* output : {&y, &dx, &mean, &rstd, &dgamma, &dbeta}) output->poison();
  for (const Device device : kBoth) {
    const View g = gamma.on(device), b = beta.on(device), dg = dgamma.on(device), db = dbeta.on(device);
    const Kernels& k = kernels(device);
    k.group_norm(y.on(device), mean.on(device), rstd.on(device), x.on(device), affine ? &g : nullptr,
                 affine ? &b : nullptr, 1e-5);
    k.group_norm_backward(dx.on(device), &dg, &db, dy.on(device), x.on(device), mean.on(device), rstd.on(device),
                          affine ? &g : nullptr, {});
  }
  // The gradients start from mean and rstd as each device rounded them.
  const double tolerance = rounding(dtype), coarse = centre == 0 ? 5 * tolerance : 2000 * tolerance;
  for (const RandomView* result : {&y, &mean, &rstd, &dbeta}) EXPECT_TRUE(result->same(2 * tolerance));
  for (const RandomView* result : {&dx, &dgamma}) EXPECT_TRUE(result->same(coarse));
}

TEST_F(CudaReduce, GroupNormAgrees) {
  with_seeds(60, [](Random& random, DType dtype) {
    const int64_t groups = random.integer(1, 4), channels = groups * random.integer(1, 9), batch = random.integer(1, 3);
    const int64_t length = random.chance(0.3) ? random.integer(1, 30000) : random.integer(1, 80);
    const auto layout = random.chance(0.5) ? Layout::contiguous : Layout::channels_last;
    const double centre = random.chance(0.3) ? 1000 : 0;  // where E[x^2] - E[x]^2 would lose everything
    check_group_norm(random, dtype, {batch, channels, length}, groups, layout, centre, random.chance(0.7),
                     random.chance(0.5));
  });
}

TEST_F(CudaReduce, GroupNormOfContiguousSpans) {
  const struct {
    Shape shape;
    int64_t groups;
  } cases[] = {
      {{1, 2, 20001}, 1},                                         // a channel ends inside a vector and a range
      {{2, 6, 5003}, 3},  {{1, 16, 4096}, 2},                     // several ranges to a group
      {{3, 9, 1}, 1},     {{2, 8, 3}, 2},     {{2, 3, 5}, 1},     // channels shorter than a vector, or hardly longer
      {{2, 5, 7}, 5},     {{1, 1, 6}, 1},     {{40, 1, 771}, 1},  // spans shorter than a block
      {{0, 4, 9}, 2},     {{2, 4, 0}, 2},
  };
  with_seeds(9, [&](Random& random, DType dtype) {
    for (const auto& c : cases)
      check_group_norm(random, dtype, c.shape, c.groups, Layout::contiguous, 0, random.chance(0.7), true);
  });
}

/// max |a - b| <= tolerance * max of `scale`.
void expect_near(const Tensor& a, const Tensor& b, const Tensor& scale, double tolerance, const std::string& what) {
  if (a.numel() == 0) return;
  EXPECT_LE(amax(abs(a - b)).item(), tolerance * amax(abs(scale)).item()) << what;
}

// dz is the plain gradient behind the mask, and the bias's gradient the sum of dz.
TEST_F(CudaReduce, GradientsThroughReluAreMaskedAndSummed) {
  const Shape shapes[] = {{2, 6, 20001}, {1, 4, 4096}, {3, 9, 1}, {2, 8, 3}, {40, 3, 771}, {2, 300, 33}, {2, 4, 0}};
  for (const DType dtype : {f32, f64})
    for (const Shape& shape : shapes)
      for (const bool last : {false, true}) {
        const TensorOptions options{dtype, Device::cuda()};
        const std::string what = concat(shape, ' ', dtype, last ? " channels last" : "");
        const auto volume = [&](const Tensor& t) {
          return last ? t.permute({0, 2, 1}).contiguous().permute({0, 2, 1}) : t;
        };
        const int64_t channels = shape[1], groups = channels % 2 == 0 ? 2 : 1;
        const Tensor y = volume(relu(randn(shape, options))), dy = volume(randn(shape, options));
        const Tensor gamma = randn({channels}, options), dgamma = empty_like(gamma), dbeta = empty_like(gamma);
        const Tensor mean = zeros({shape[0], groups}, options), rstd = ones({shape[0], groups}, options);
        const Tensor plain = empty_like(y), masked = empty_like(y), dz = empty_like(y), dbias = empty_like(gamma);
        const Kernels& k = kernels(Device::cuda());
        const View g = gamma.view_in(), dg = dgamma.view_out(), db = dbeta.view_out(), sums = dbias.view_out();
        for (const bool norm : {false, true}) {
          if (norm) {
            const auto run = [&](const Tensor& dx, const ReluBefore& before) {
              k.group_norm_backward(dx.view_out(), &dg, &db, dy.view_in(), y.view_in(), mean.view_in(), rstd.view_in(),
                                    &g, before);
            };
            run(plain, {});
            run(dz, {true, &sums});
          } else {
            plain.copy_(dy);
            k.relu_bias_backward(dz.view_out(), sums, dy.view_in(), y.view_in());
          }
          k.binary(BinaryOp::relu_grad, masked.view_out(), plain.view_in(), y.view_in(), 0, 0);
          expect_near(dz, masked, masked, norm ? 4 * rounding(dtype) : 0, what);
          const Tensor expected = sum(dz, {0, 2});
          expect_near(dbias, expected, expected.numel() > 0 ? sum(abs(dz), {0, 2}) : expected, rounding(dtype), what);
        }
      }
}

TEST_F(CudaReduce, MaxPoolAgrees) {
  with_all_floats(80, [](Random& random, DType dtype) {
    PoolGeometry g;
    Shape x_shape{random.integer(1, 3), random.integer(1, 4)}, y_shape = x_shape;
    for (int a = 0; a < 3; ++a) {
      int64_t span;
      do {
        g.kernel_size[a] = random.integer(1, 4);
        g.stride[a] = random.integer(1, 4);
        g.padding[a] = random.integer(0, g.kernel_size[a] / 2);
        g.dilation[a] = random.integer(1, 3);
        x_shape.push_back(random.integer(1, 12));
        span = x_shape.back() + 2 * g.padding[a] - g.dilation[a] * (g.kernel_size[a] - 1) - 1;
        if (span < 0) x_shape.erase(x_shape.size() - 1);
      } while (span < 0);
      y_shape.push_back(span / g.stride[a] + 1);
    }
    RandomView x(dtype, x_shape, any_layout(random, true), random),
        y(dtype, y_shape, any_layout(random, false), random);
    RandomView indices(random.chance(0.5) ? i64 : i32, y_shape, any_layout(random, false), random);
    RandomView dy(dtype, y_shape, any_layout(random, true), random),
        dx(dtype, x_shape, any_layout(random, false), random);
    x.fill(random, -5, 5);  // many ties
    dy.fill(random, -5, 5);
    indices.fill(random, -9, -1);
    for (RandomView* output : {&y, &dx}) output->poison();
    for (const Device device : kBoth) {
      const View named = indices.on(device);
      kernels(device).max_pool(y.on(device), &named, x.on(device), g);
      kernels(device).max_pool_backward(dx.on(device), dy.on(device), named, g);
    }
    for (const RandomView* result : {&y, &indices, &dx}) EXPECT_TRUE(result->same(0));
  });
}

TEST_F(CudaReduce, ResampleAgrees) {
  with_all_floats(100, [](Random& random, DType dtype) {
    Resample map;
    map.mode = static_cast<Resample::Mode>(random.integer(0, 2));
    const int64_t rank = random.integer(1, 5), n = random.integer(4, 20);
    int64_t outputs = random.integer(1, 30);
    if (map.mode == Resample::Mode::box) {
      map.kernel = random.integer(1, 4);
      map.stride = random.integer(1, 4);
      map.padding = random.integer(0, map.kernel / 2);
      map.count_include_pad = random.chance(0.5);
      outputs = (n + 2 * map.padding - map.kernel) / map.stride + 1;
    } else {
      map.align_corners = map.mode == Resample::Mode::linear && outputs > 1 && random.chance(0.5);
      map.scale = map.align_corners ? static_cast<double>(n - 1) / static_cast<double>(outputs - 1)
                                    : static_cast<double>(n) / static_cast<double>(outputs);
    }
    const int axis = static_cast<int>(random.integer(0, rank - 1));
    Shape shape = random_shape(random, rank, 7), small = shape, large = shape;
    small[axis] = n;
    large[axis] = outputs;
    for (const bool transposed : {false, true}) {
      RandomView in(dtype, transposed ? large : small, any_layout(random, true), random);
      RandomView out(dtype, transposed ? small : large, any_layout(random, false), random);
      in.fill(random, -5, 5, false);
      out.poison();
      SCOPED_TRACE(concat(small, " to ", large, " along ", axis, transposed ? ", transposed" : ""));
      for (const Device device : kBoth) kernels(device).resample(out.on(device), in.on(device), axis, map, transposed);
      EXPECT_TRUE(out.same(rounding(dtype)));
    }
  });
}

}  // namespace
}  // namespace voxgrad::cudatest
