// Compares the CUDA kernels for reductions, cumsum, argmax, sorting, softmax and max pooling with those of the CPU.
// Most tests call the kernels through the kernel table, with random shapes and strides. Outputs contain NaN or random
// numbers before the call, and each output lies between guard values that no kernel may change.
#include <functional>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/sort.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using CudaReduce = OnGpu;

constexpr Device kBoth[] = {Device::cpu(), Device::cuda()};

double rounding(DType dtype) { return dtype == f64 ? 1e-12 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 1e-6; }

/// Calls body(random, dtype) with `count` seeds, for f32 and f64. A failure reports its seed.
void with_seeds(unsigned count, const std::function<void(Random&, DType)>& body) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + count && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    Random random(seed);
    body(random, seed % 3 ? f32 : f64);
  }
}

/// Like with_seeds(), but also for bf16 and f16.
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

TEST_F(CudaReduce, ReduceMatchesCpuOverAnyAxes) {
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
    EXPECT_TRUE(out.matches_cpu(op == ReduceOp::sum || op == ReduceOp::mean ? rounding(dtype) : 0));
  });
}

TEST_F(CudaReduce, ReduceHandlesAnyAlignment) {
  const struct {
    Shape shape, kept;
  } cases[] = {
      {{100003}, {1}},                 // one row, split into ranges
      {{3, 100001}, {3, 1}},           // rows, split into ranges
      {{7, 40, 41}, {7, 1, 1}},        // one warp per row
      {{33, 37}, {33, 1}},             // a few threads per row
      {{33, 48}, {33, 1}},             // a few threads per row, whole vectors
      {{900, 5}, {900, 1}},            // one thread per row
      {{900, 19}, {900, 1}},           // four threads per row
      {{2, 3, 30, 31}, {1, 3, 1, 1}},  // a result reads two stretches of 930 elements
      {{5, 3, 9000}, {1, 3, 1}},       // a result reads five stretches of 9000 elements, split into ranges
      {{9, 4, 130}, {1, 1, 130}},      // 130 columns are not whole vectors of f32
      {{9, 4, 132}, {1, 4, 132}},      // 132 columns are whole vectors of f32
      {{9000, 8}, {1, 8}},             // few columns, split into ranges
      {{2, 700, 128}, {2, 1, 128}},    // columns of each sample, split into ranges
      {{3, 1 << 19}, {1, 1 << 19}},    // one thread per column
      {{3, (1 << 19) + 1}, {1, (1 << 19) + 1}},
  };
  with_all_floats(12, [&](Random& random, DType dtype) {
    for (const auto& c : cases)
      for (const auto op : {ReduceOp::sum, ReduceOp::max}) {
        RandomView in(dtype, c.shape, Layout::contiguous, random), out(dtype, c.kept, Layout::contiguous, random);
        in.fill(random, -100, 100, false);
        out.poison();
        SCOPED_TRACE(concat(c.shape, " to ", c.kept));
        for (const Device device : kBoth) kernels(device).reduce(op, out.on(device), in.on(device));
        EXPECT_TRUE(out.matches_cpu(op == ReduceOp::sum ? rounding(dtype) : 0));
      }
  });
}

TEST_F(CudaReduce, SumsIntegersAndPropagatesNaN) {
  with_seeds(20, [](Random& random, DType) {
    for (const DType dtype : {i64, i32, u8, b8}) {
      RandomView in(dtype, {70, 300}, any_layout(random, true), random), out(i64, {70, 1}, Layout::spaced, random);
      in.fill(random, 0, dtype == b8 ? 1 : 255);
      out.fill(random, 0, 9);
      for (const Device device : kBoth) kernels(device).reduce(ReduceOp::sum, out.on(device), in.on(device));
      EXPECT_TRUE(out.matches_cpu(0)) << dtype;
    }
    const Tensor x = randn({5000});
    x.set({random.integer(0, 4999)}, std::nan(""));
    const Tensor highest = empty({1}, {.device = Device::cuda()});
    cuda_kernels().reduce(ReduceOp::max, highest.view_out(), x.to(Device::cuda()).view_in());
    EXPECT_TRUE(std::isnan(highest.item()));
  });
}

TEST_F(CudaReduce, SumsOfEmptyAxesAreZero) {
  const Tensor x = empty({3, 0, 2}, {.device = Device::cuda()}), y = full({3, 1, 2}, 7, x.options());
  cuda_kernels().reduce(ReduceOp::sum, y.view_out(), x.view_in());
  EXPECT_EQ(y.to_vector<double>(), std::vector<double>(6, 0));
}

TEST_F(CudaReduce, IsBitwiseReproducible) {
  const Tensor x = randn({2, 5, 40, 41, 42}).to(Device::cuda());
  std::vector<float> first;
  for (int run = 0; run < 20; ++run) {
    const Tensor y = empty({1, 5, 1, 1, 1}, x.options());
    cuda_kernels().reduce(ReduceOp::sum, y.view_out(), x.view_in());
    if (run == 0) first = y.to_vector<float>();
    ASSERT_EQ(y.to_vector<float>(), first) << "run " << run;
  }
}

// A float sum of equal numbers stops growing after 2^24 terms, so the kernels add only a few numbers in float.
TEST_F(CudaReduce, SumsManyHalfPrecisionElements) {
  for (const DType dtype : {bf16, f16})
    for (const Shape& shape : {Shape{1, 1 << 26}, Shape{1 << 23, 8}, Shape{8, 1 << 23}}) {
      const Tensor x = full(shape, 0x1p-11, {dtype, Device::cuda()});
      for (const int64_t axis : {0, 1})
        EXPECT_EQ(sum(x, axis).to(f64).at({-1}), static_cast<double>(x.size(axis)) * 0x1p-11) << shape << ' ' << axis;
    }
}

/// Returns a random shape for kernels that work along one axis: one line, long lines, short lines, or higher rank.
Shape line_shape(Random& random) {
  switch (random.integer(0, 3)) {
    case 0:
      return {random.integer(1, 40000)};
    case 1:
      return {random.integer(1, 20), random.integer(1, 3000)};
    case 2:
      return {random.integer(1, 3), random.integer(1, 9), random.integer(1, 40), random.integer(1, 40)};
    default:
      return {random.integer(1, 6000), random.integer(1, 6)};
  }
}

/// Calls kernel(kernels, out, in, axis) on both devices for random views with many ties, and compares the results.
/// `out` has result_size(random, size) elements along the axis, and the dtype result_dtype(dtype).
void expect_lines_match(const std::function<int64_t(Random&, int64_t size)>& result_size, DType (*result_dtype)(DType),
                        const std::function<double(DType)>& tolerance,
                        const std::function<void(const Kernels&, const View&, const View&, int)>& kernel) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + 160 && !testing::Test::HasFailure(); ++seed) {
    Random random(seed);
    constexpr DType kAll[] = {f32, f64, bf16, f16, i64, i32, u8, b8};
    const DType dtype = kAll[seed % 8];
    const Shape shape = line_shape(random);
    const int64_t axis = random.integer(0, shape.size() - 1);
    Shape result = shape;
    result[axis] = result_size(random, shape[axis]);
    RandomView in(dtype, shape, any_layout(random, true), random);
    RandomView out(result_dtype(dtype), result, any_layout(random, false), random);
    const bool wide = is_floating(dtype) || dtype == i64 || dtype == i32;
    in.fill(random, wide ? -50 : 0, dtype == b8 ? 1 : 50);
    out.fill(random, 0, 1);
    SCOPED_TRACE(concat("seed ", seed, ": ", dtype, ' ', shape, " along ", axis, ", ", result[axis]));
    for (const Device device : kBoth) kernel(kernels(device), out.on(device), in.on(device), static_cast<int>(axis));
    EXPECT_TRUE(out.matches_cpu(tolerance(dtype)));
  }
}

DType index_dtype(DType) { return i64; }
double no_tolerance(DType) { return 0; }

TEST_F(CudaReduce, CumsumMatchesCpu) {
  for (const bool reverse : {false, true})
    expect_lines_match(
        [](Random&, int64_t size) { return size; }, [](DType t) { return is_floating(t) ? t : i64; },
        [](DType t) { return is_floating(t) ? rounding(t) : 0; },
        [=](const Kernels& k, const View& out, const View& in, int axis) { k.cumsum(out, in, axis, reverse); });
}

TEST_F(CudaReduce, ArgmaxMatchesCpu) {
  for (const bool largest : {false, true})
    expect_lines_match(
        [](Random&, int64_t) { return 1; }, index_dtype, no_tolerance,
        [=](const Kernels& k, const View& out, const View& in, int axis) { k.argmax(out, in, axis, largest); });
}

TEST_F(CudaReduce, SortMatchesCpu) {
  for (const bool descending : {false, true})
    expect_lines_match(
        [](Random& random, int64_t size) { return random.chance(0.5) ? size : random.integer(1, size); }, index_dtype,
        no_tolerance,
        [=](const Kernels& k, const View& out, const View& in, int axis) { k.sort(out, in, axis, descending); });
}

TEST_F(CudaReduce, ClassAxisReductionsMatchCpu) {
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const int64_t classes : {2, 3, 4, 8, 14, 32, 65})
      for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last}) {
        const Tensor x = (randn({2, classes, 9, 16, 16}) * 3).to(i64).to(dtype).contiguous(format);
        const Tensor gpu_x = x.to(Device::cuda());
        SCOPED_TRACE(concat(dtype, ' ', classes, " classes, ", static_cast<int>(format)));
        EXPECT_EQ(argmax(gpu_x, 1).to_vector<int64_t>(), argmax(x, 1).to_vector<int64_t>());
        EXPECT_EQ(sort(gpu_x, 1).indices.to_vector<int64_t>(), sort(x, 1).indices.to_vector<int64_t>());
        EXPECT_EQ(cumsum(gpu_x, 1).to_vector(), cumsum(x, 1).to_vector());
        EXPECT_EQ(sum(gpu_x, 1).to_vector(), sum(x, 1).to_vector());
      }
}

TEST_F(CudaReduce, SoftmaxMatchesCpu) {
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
    EXPECT_TRUE(y.matches_cpu(rounding(dtype)));
  });
}

TEST_F(CudaReduce, MaxPoolMatchesCpu) {
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
      const View index_view = indices.on(device);
      kernels(device).max_pool(y.on(device), &index_view, x.on(device), g);
      kernels(device).max_pool_backward(dx.on(device), dy.on(device), index_view, g);
    }
    for (const RandomView* result : {&y, &indices, &dx}) EXPECT_TRUE(result->matches_cpu(0));
  });
}

}  // namespace
}  // namespace voxgrad::cudatest
