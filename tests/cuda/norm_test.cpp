// Tests the CUDA kernels of group normalization, and of gradients through a preceding ReLU, against the CPU kernels in
// double. Covers all floating-point dtypes and contiguous, channels-last and strided tensors. Guard bands around the
// tensors detect writes outside of them.
#include <functional>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using CudaNorm = OnGpu;

constexpr Device kBoth[] = {Device::cpu(), Device::cuda()};

double rounding(DType dtype) { return dtype == f64 ? 1e-12 : 1e-6; }

/// Calls body(random) with `count` seeds. A failure reports its seed.
void with_seeds(unsigned count, const std::function<void(Random&)>& body) {
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + count && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    Random random(seed);
    body(random);
  }
}

constexpr DType kFloats[] = {f32, f64, bf16, f16};
DType any_float(Random& random) { return kFloats[random.integer(0, 3)]; }
DType wide(DType dtype) { return dtype == f64 ? f64 : f32; }

/// Returns the relative error of rounding to a half-precision dtype, 0 for other dtypes.
double half_rounding(DType dtype) { return dtype == bf16 ? 0x1p-8 : dtype == f16 ? 0x1p-11 : 0; }

/// Returns a copy of the CPU part of the view in double.
RandomView in_double(const RandomView& view) {
  RandomView copy = view;
  copy.cpu = view.cpu.to(f64).clone();
  copy.view.dtype = f64;
  return copy;
}

/// Returns the largest magnitude in the CPU part of the view.
double largest(const RandomView& view) {
  const auto values = view.cpu.to_vector<double>();
  double result = 0;
  for (size_t i = 0; i < values.size(); ++i)
    if (view.inside[i]) result = std::max(result, std::abs(values[i]));
  return result;
}

/// Succeeds if the guards are unchanged and each element on the GPU differs from `expected` by at most `tolerance` plus
/// one rounding to the dtype of the result.
testing::AssertionResult rounds_to(const RandomView& result, const RandomView& expected, double tolerance) {
  const auto got = result.gpu.to_vector<double>(), want = expected.cpu.to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
    const double bound = half_rounding(result.view.dtype) * std::abs(want[i]) + tolerance;
    if (result.inside[i] && std::abs(got[i] - want[i]) <= bound) continue;
    return testing::AssertionFailure() << (result.inside[i] ? "element " : "guard ") << i << " of the buffer is "
                                       << got[i] << ", expected " << want[i] << " +- " << bound;
  }
  return testing::AssertionSuccess();
}

/// Returns a view of pairs (N, groups, 2) in f64 that are aligned to 16 bytes.
RandomView random_pairs(int64_t samples, int64_t groups, Random& random) {
  for (;;) {
    RandomView view(f64, {samples, groups, 2}, Layout::contiguous, random);
    if (view.start % 2 == 0) return view;
  }
}

enum class Alignment {
  independent,  // each tensor has its own alignment
  equal,        // all tensors have the same alignment
  vector        // all tensors are aligned for vector loads
};

/// Compares the forward and the backward pass on the GPU with the CPU kernels in double. `center` is the mean of x.
void check_group_norm(Random& random, DType dtype, const Shape& shape, int64_t groups, Layout layout, double center,
                      Alignment alignment) {
  const bool affine = random.chance(0.7);
  // Use activations only if `center` is 0. For large x, rounding in float would move elements across the kink.
  const auto random_activation = [&] {
    return ActivationArguments{static_cast<ActivationKind>(random.integer(0, 4)), 0.3};
  };
  NormActivations activations;
  if (center == 0 && random.chance(0.7))
    (random.chance(0.5) ? activations.before : activations.after) = random_activation();
  if (center == 0 && random.chance(0.1)) activations = {random_activation(), random_activation()};
  const DType parameters = random.chance(0.5) ? dtype : wide(dtype);
  SCOPED_TRACE(concat(dtype, " ", shape, ", ", groups, " groups, center ", center, affine ? ", affine in " : ", ",
                      parameters, ", alignment ", static_cast<int>(alignment), ", activations ",
                      static_cast<int>(activations.before.kind), " and ", static_cast<int>(activations.after.kind)));
  auto volume = [&, seed = static_cast<unsigned>(random.integer(0, 1000))]() mutable {
    for (;; ++seed) {
      Random fixed(seed);
      RandomView view(dtype, shape, layout, alignment == Alignment::independent ? random : fixed);
      if (alignment != Alignment::vector || view.start % 8 == 0) return view;
    }
  };
  enum { x, dy, y, dx, gamma, beta, statistics, means, dgamma, dbeta, kCount };
  const bool residual = random.chance(0.3);  // uses dy as the residual
  std::vector<RandomView> gpu, cpu;
  for (int i = x; i <= dx; ++i) gpu.push_back(volume());
  for (int i = gamma; i <= beta; ++i) gpu.emplace_back(parameters, Shape{shape[1]}, Layout::spaced, random);
  for (int i = statistics; i <= means; ++i) gpu.push_back(random_pairs(shape[0], groups, random));
  for (int i = dgamma; i <= dbeta; ++i) gpu.emplace_back(parameters, Shape{shape[1]}, Layout::contiguous, random);
  gpu[x].fill(random, center - 2, center + 2, false);
  for (int i : {dy, gamma, beta}) gpu[static_cast<size_t>(i)].fill(random, -2, 2, false);
  for (int i : {y, dx, statistics, means, dgamma, dbeta}) gpu[static_cast<size_t>(i)].poison();
  for (const RandomView& view : gpu) cpu.push_back(in_double(view));
  for (const Device device : kBoth) {
    std::vector<View> v;
    for (const RandomView& view : device.is_cuda() ? gpu : cpu) v.push_back(view.on(device));
    const Kernels& k = kernels(device);
    k.group_norm(v[y], v[statistics], v[x], affine ? &v[gamma] : nullptr, affine ? &v[beta] : nullptr,
                 residual ? &v[dy] : nullptr, 1e-5, activations, nullptr);
    k.group_norm_backward({v[dx], &v[dgamma], &v[dbeta]}, v[means], v[dy], v[x], v[statistics],
                          affine ? &v[gamma] : nullptr, affine ? &v[beta] : nullptr, activations, nullptr);
  }
  // Each device uses its own statistics in the backward pass. A large `center` makes their rounding errors large.
  const double tolerance = 2 * rounding(dtype), coarse = center == 0 ? 5 * tolerance : 1000 * tolerance;
  const double terms = std::sqrt(static_cast<double>(shape[0] * shape[2]));
  const auto expect = [&](int i, double bound) {
    EXPECT_TRUE(rounds_to(gpu[static_cast<size_t>(i)], cpu[static_cast<size_t>(i)], bound)) << i;
  };
  for (int i : {y, statistics}) expect(i, tolerance * (1 + largest(cpu[static_cast<size_t>(i)])));
  double largest_rstd = 0;
  for (int64_t i = 0; i < shape[0] * groups; ++i)
    largest_rstd = std::max(largest_rstd, cpu[statistics].cpu.at({cpu[statistics].start + 2 * i + 1}));
  expect(dx, coarse * 4 * largest_rstd);
  expect(dgamma, coarse * (largest(cpu[dgamma]) + 2 * terms));
  expect(dbeta, tolerance * (largest(cpu[dbeta]) + 2 * terms));
}

/// Returns a mean so large that E[x^2] - E[x]^2 would lose all digits, while the dtype still resolves the deviations.
double large_center(DType dtype) { return dtype == bf16 ? 100 : 1000; }

TEST_F(CudaNorm, GroupNormMatchesCpu) {
  with_seeds(80, [](Random& random) {
    const DType dtype = any_float(random);
    const int64_t groups = random.integer(1, 4), channels = groups * random.integer(1, 9), batch = random.integer(1, 3);
    const int64_t length = random.chance(0.3) ? random.integer(1, 30000) : random.integer(1, 80);
    const auto layout = random.chance(0.4)   ? Layout::contiguous
                        : random.chance(0.7) ? Layout::channels_last
                                             : Layout::spaced;
    check_group_norm(random, dtype, {batch, channels, length}, groups, layout,
                     random.chance(0.3) ? large_center(dtype) : 0,
                     static_cast<Alignment>(layout == Layout::spaced ? 0 : random.integer(0, 2)));
  });
}

TEST_F(CudaNorm, GroupNormMatchesCpuForContiguousTensors) {
  const struct {
    Shape shape;
    int64_t groups;
  } cases[] = {
      {{1, 2, 40001}, 1},                                      // a channel ends within a vector; rows split into ranges
      {{2, 6, 5003}, 3},  {{1, 16, 4096}, 2},                  // several channels per group
      {{3, 9, 1}, 1},     {{2, 8, 3}, 2},     {{2, 3, 5}, 1},  // channels about as long as a vector
      {{2, 5, 7}, 5},     {{1, 1, 6}, 1},     {{40, 1, 771}, 1},  // fewer vectors than threads
      {{0, 4, 9}, 2},     {{2, 4, 0}, 2},
  };
  with_seeds(3, [&](Random& random) {
    for (const auto& c : cases)
      for (const DType dtype : kFloats)
        check_group_norm(random, dtype, c.shape, c.groups, Layout::contiguous, 0,
                         random.chance(0.5) ? Alignment::equal : Alignment::vector);
  });
}

TEST_F(CudaNorm, GroupNormMatchesCpuForChannelsInnermost) {
  const struct {
    Shape shape;
    int64_t groups;  // tested in addition to 1, C / 2 and C
  } cases[] = {
      {{1, 3, 1001}, 3},   {{2, 12, 130}, 4},                    // rows are not whole half-precision vectors
      {{2, 8, 777}, 2},    {{2, 24, 501}, 3},                    // groups smaller than a vector
      {{1, 24, 333}, 4},   {{2, 40, 999}, 10},                   // groups end within a vector
      {{1, 32, 4099}, 8},  {{1, 8, 20003}, 4},                   // positions split into ranges
      {{2, 320, 131}, 32}, {{1, 520, 70}, 65}, {{2, 16, 1}, 4},  // more channels than a tile; a single position
      {{2, 16, 0}, 2},     {{0, 16, 9}, 2},
  };
  with_seeds(2, [&](Random& random) {
    for (const auto& c : cases)
      for (const DType dtype : kFloats)
        for (const int64_t groups : {int64_t{1}, c.shape[1] / 2, c.shape[1], c.groups})
          if (c.shape[1] % groups == 0 && random.chance(0.6))
            check_group_norm(random, dtype, c.shape, groups, Layout::channels_last,
                             random.chance(0.3) ? large_center(dtype) : 0,
                             random.chance(0.8) ? Alignment::vector : Alignment::independent);
  });
}

/// Returns a GPU tensor (N, C, L) with the channels innermost and random elements around `center`.
Tensor channels_innermost(const Shape& shape, DType dtype, double center) {
  const Tensor t = randn({shape[0], shape[2], shape[1]}, {.device = Device::cuda()}) + center;
  return t.to(dtype).permute({0, 2, 1});
}

// Gaps between samples and between positions must not change the results, and repeated runs must agree bitwise.
TEST_F(CudaNorm, GroupNormOfSlicesIsBitwiseReproducible) {
  const Shape shape{2, 48, 5001};
  for (const DType dtype : kFloats) {
    const Tensor x = channels_innermost(shape, dtype, 3), dy = channels_innermost(shape, dtype, 0);
    const auto run = [&](int64_t extra) {
      const auto sliced = [&](const Tensor& from) {
        const Tensor whole = channels_innermost({shape[0], shape[1] + 2 * extra, shape[2] + extra}, dtype, 9);
        const Tensor part = whole.narrow(1, extra, shape[1]).narrow(2, 0, shape[2]);
        if (from.defined()) part.copy_(from);
        return std::pair(whole, part);
      };
      const auto [x_whole, x_part] = sliced(x);
      const auto [dy_whole, dy_part] = sliced(dy);
      const auto [y_whole, y_part] = sliced({});
      const auto [dx_whole, dx_part] = sliced({});
      const auto guards = [&, &whole = y_whole] { return whole.narrow(1, 0, extra).contiguous().to_vector<double>(); };
      const auto before = guards();
      const Tensor statistics = empty({2, 6, 2}, {f64, Device::cuda()}), means = empty_like(statistics);
      const Tensor dgamma = empty({shape[1]}, {wide(dtype), Device::cuda()}), dbeta = empty_like(dgamma);
      const View dg = dgamma.view_out(), db = dbeta.view_out();
      cuda_kernels().group_norm(y_part.view_out(), statistics.view_out(), x_part.view_in(), nullptr, nullptr, nullptr,
                                1e-5, {}, nullptr);
      cuda_kernels().group_norm_backward({dx_part.view_out(), &dg, &db}, means.view_out(), dy_part.view_in(),
                                         x_part.view_in(), statistics.view_in(), nullptr, nullptr, {}, nullptr);
      EXPECT_EQ(guards(), before);
      std::vector<double> all;
      for (const Tensor& t : {y_part, dx_part, statistics, dgamma, dbeta})
        for (const double value : t.contiguous().to_vector<double>()) all.push_back(value);
      return all;
    };
    const auto first = run(0);
    for (const int64_t extra : {0, 8, 0, 16})
      ASSERT_EQ(run(extra), first) << dtype << ", " << extra << " extra channels";
  }
}

// All elements except one are equal, so the outlier determines the variance. The kernels sum deviations from a pivot,
// the first element that a thread reads. The result must be accurate even if the outlier is a pivot.
TEST_F(CudaNorm, GroupNormHandlesAnOutlier) {
  for (const DType dtype : kFloats)
    for (const bool last : {false, true}) {
      const Tensor ones = full({1, 20000, 8}, 0.1).to(dtype);
      ones.set({0, 0, 3}, 1000);
      const Tensor host = last ? ones.permute({0, 2, 1}) : ones.reshape({1, 8, 20000});
      const Tensor x = host.to(Device::cuda()), y = empty_like(x);
      const Tensor statistics = empty({1, 1, 2}, {f64, Device::cuda()});
      cuda_kernels().group_norm(y.view_out(), statistics.view_out(), x.view_in(), nullptr, nullptr, nullptr, 0, {},
                                nullptr);
      const double deviation = 1000 - host.at({0, 7, 19999}), count = 160000;
      EXPECT_NEAR(statistics.at({0, 0, 1}) * deviation, count / std::sqrt(count - 1), 1e-5 * std::sqrt(count))
          << dtype << last;
    }
}

// The squares overflow float, so the kernels must repeat the sums in double. Unaligned rows, and lengths that are not a
// multiple of a vector, also cover the code for single elements.
TEST_F(CudaNorm, GroupNormHandlesSquaresBeyondFloat) {
  for (const DType dtype : {f32, bf16})
    for (const Layout layout : {Layout::contiguous, Layout::channels_last, Layout::spaced})
      with_seeds(8, [&](Random& random) {
        const Shape shape{2, 8, random.integer(500, 20000)};
        enum { x, dy, y, dx, statistics, means, dgamma, kCount };
        std::vector<RandomView> gpu, cpu;
        for (int i = x; i <= dx; ++i) gpu.emplace_back(dtype, shape, layout, random);
        for (int i = statistics; i <= means; ++i) gpu.push_back(random_pairs(2, 4, random));
        gpu.emplace_back(f32, Shape{8}, Layout::contiguous, random);
        gpu[x].fill(random, -2e30, 2e30, false);
        gpu[dy].fill(random, -2, 2, false);
        for (size_t i = y; i < kCount; ++i) gpu[i].poison();
        for (const RandomView& view : gpu) cpu.push_back(in_double(view));
        for (const Device device : kBoth) {
          std::vector<View> v;
          for (const RandomView& view : device.is_cuda() ? gpu : cpu) v.push_back(view.on(device));
          const Kernels& k = kernels(device);
          k.group_norm(v[y], v[statistics], v[x], nullptr, nullptr, nullptr, 0, {}, nullptr);
          k.group_norm_backward({v[dx], &v[dgamma]}, v[means], v[dy], v[x], v[statistics], nullptr, nullptr, {},
                                nullptr);
        }
        for (const size_t i : {y, dgamma})
          EXPECT_TRUE(rounds_to(gpu[i], cpu[i], 1e-4 * largest(cpu[i]))) << dtype << ' ' << i;
        EXPECT_TRUE(rounds_to(gpu[statistics], cpu[statistics], 1e26));
        const auto start = static_cast<size_t>(gpu[statistics].start);
        const auto got = gpu[statistics].gpu.to_vector<double>(), want = cpu[statistics].cpu.to_vector<double>();
        for (size_t i = start + 1; i < start + 16; i += 2) EXPECT_NEAR(got[i], want[i], 1e-4 * want[i]) << dtype;
      });
}

/// Expects max |a - b| <= tolerance * max |scale|.
void expect_near(const Tensor& a, const Tensor& b, const Tensor& scale, double tolerance, const std::string& context) {
  if (a.numel() == 0) return;
  EXPECT_LE(amax(abs(a - b)).item(), tolerance * amax(abs(scale)).item()) << context;
}

// dz must equal the unmasked gradient times the mask of the ReLU. The gradient of the bias must equal the sum of dz.
TEST_F(CudaNorm, GroupNormBackwardIncludesPrecedingBiasAndRelu) {
  const Shape shapes[] = {{2, 6, 20001}, {1, 4, 4096}, {3, 9, 1},    {2, 8, 3},     {40, 3, 771},
                          {2, 300, 33},  {2, 4, 0},    {2, 24, 333}, {1, 8, 20003}, {1, 320, 77}};
  for (const DType dtype : kFloats)
    for (const Shape& shape : shapes)
      for (const bool last : {false, true}) {
        const std::string context = concat(shape, ' ', dtype, last ? " channels last" : "");
        const auto volume = [&] {
          return last ? channels_innermost(shape, dtype, 0) : randn(shape, {.device = Device::cuda()}).to(dtype);
        };
        const int64_t channels = shape[1], groups = channels % 2 == 0 ? 2 : 1;
        const Tensor y = relu(volume()), dy = volume();
        const TensorOptions parameters{last ? dtype : wide(dtype), Device::cuda()};
        const Tensor gamma = randn({channels}, {wide(dtype), Device::cuda()}).to(parameters.dtype);
        const Tensor dgamma = empty_like(gamma);
        const Tensor dbeta = empty_like(gamma), dbias = empty_like(gamma);
        const Tensor statistics = zeros({shape[0], groups, 2}, {f64, Device::cuda()}), means = empty_like(statistics);
        select(statistics, 2, 1).fill_(1);
        const Tensor plain = empty_like(y), masked = empty_like(y), dz = empty_like(y);
        const Kernels& k = kernels(Device::cuda());
        const View g = gamma.view_in(), dg = dgamma.view_out(), db = dbeta.view_out(), sums = dbias.view_out();
        const auto run = [&](const Tensor& dx, const View* sums_of_dx, const NormActivations& activations) {
          k.group_norm_backward({dx.view_out(), &dg, &db, sums_of_dx}, means.view_out(), dy.view_in(), y.view_in(),
                                statistics.view_in(), &g, nullptr, activations, nullptr);
        };
        run(plain, nullptr, {});
        run(dz, &sums, {.before = {ActivationKind::relu}});
        k.binary(BinaryOp::relu_grad, masked.view_out(), plain.view_in(), y.view_in(), 0, 0);
        const Tensor got = dz.to(f64), want = masked.to(f64), expected = sum(got, {0, 2});
        expect_near(got, want, want, 4 * rounding(dtype) + 2 * half_rounding(dtype), context);
        expect_near(dbias.to(f64), expected, expected.numel() > 0 ? sum(abs(got), {0, 2}) : expected,
                    rounding(dtype) + half_rounding(parameters.dtype), context);
      }
}

}  // namespace
}  // namespace voxgrad::cudatest
