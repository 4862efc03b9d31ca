// Tests reductions, sorting, prelu, split and one_hot on inputs that the operator table does not cover: infinities,
// zeros, ties, NaN and long axes. Also tests negative axes of all operators that take an axis.
#include "ops/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/gradcheck.h"
#include "ops/shape.h"
#include "ops/sort.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using Doubles = std::vector<double>;
using Integers = std::vector<int64_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(LogSumExp, HandlesInfinitiesAndLargeNumbers) {
  for (const Device device : devices()) {
    const Tensor x = tensor({{-kInf, -kInf}, {kInf, 1}, {1, -kInf}, {1000, 1000}, {-1000, -1000}}, {f32, device});
    const Doubles y = logsumexp(x, 1).to_vector();
    EXPECT_EQ(y[0], -kInf);
    EXPECT_EQ(y[1], kInf);
    EXPECT_EQ(y[2], 1);
    EXPECT_NEAR(y[3], 1000 + std::log(2.0), 1e-4);
    EXPECT_NEAR(y[4], -1000 + std::log(2.0), 1e-4);
    EXPECT_TRUE(std::isnan(logsumexp(tensor({1, kNan}, {f32, device}), 0).item()));
    EXPECT_EQ(logsumexp(zeros({2, 0}, {f64, device}), 1).to_vector(), (Doubles{-kInf, -kInf}));
    EXPECT_EQ(logsumexp(tensor({3}, {i64, device}), 0).dtype(), f32);
  }
}

TEST(Prod, HasCorrectGradientsAtZeroFactors) {
  const Tensor x = tensor({{2, 0, 3, 4}, {0, 5, 0, 1}, {1, 2, 3, 4}}, {f64}).requires_grad_();
  const auto function = [](const Tensors& t) { return Tensors{prod(t[0], 1)}; };
  EXPECT_TRUE(gradcheck(function, {x}).passed);
  EXPECT_TRUE(gradgradcheck(function, {x}).passed);
  EXPECT_EQ(grad({sum(prod(x, 1))}, {x})[0].to_vector(), (Doubles{0, 24, 0, 0, 0, 0, 0, 0, 24, 12, 8, 6}));
}

TEST(Prod, AcceptsIntegersAndEmptyInputs) {
  for (const Device device : devices()) {
    EXPECT_EQ(prod(tensor({{2, 3}, {4, 5}}, {u8, device}), 0).to_vector<int64_t>(), (Integers{8, 15}));
    EXPECT_EQ(prod(full({8}, 200, {u8, device})).item<int64_t>(), 2560000000000000000);
    EXPECT_EQ(prod(zeros({2, 0}, {f32, device}), 1).to_vector(), (Doubles{1, 1}));
  }
}

TEST(Norm, HasZeroGradientAtZero) {
  for (const Device device : devices())
    for (const double p : {0.5, 1.0, 1.5, 2.0, 3.0, kInf}) {
      const Tensor x = zeros({2, 3}, {f64, device, true});
      EXPECT_EQ(grad({sum(norm(x, p, 1))}, {x})[0].to_vector(), Doubles(6, 0)) << p;
    }
}

TEST(Std, HasZeroGradientForConstantInput) {
  const Tensor x = full({2, 3}, 7, {f64}).requires_grad_();
  EXPECT_EQ(grad({sum(x.std(1))}, {x})[0].to_vector(), Doubles(6, 0));
}

TEST(Cumsum, WrapsIntegersAndSumsHalvesInHigherPrecision) {
  for (const Device device : devices()) {
    const Tensor large = tensor({INT32_MAX, 1}, {i32, device});
    EXPECT_EQ(cumsum(large, 0).to_vector<int64_t>(), (Integers{INT32_MAX, int64_t{INT32_MAX} + 1}));
    const Tensor largest = full({2}, 0, {i64, device});
    largest.set({0}, 0x1p62);
    largest.set({1}, 0x1p62);
    EXPECT_EQ(cumsum(largest, 0).at<int64_t>({1}), INT64_MIN);
    EXPECT_EQ(cumsum(full({3}, 200, {u8, device}), 0).to_vector<int64_t>(), (Integers{200, 400, 600}));
    // A sum of ones in f16 would stop at 2048.
    EXPECT_EQ(cumsum(ones({5000}, {f16, device}), 0).at({-1}), 5000);
    EXPECT_EQ(cumsum(tensor(7.0, {f32, device}), 0).item(), 7);
  }
}

TEST(Cumsum, HandlesLongAndManyLines) {
  for (const Device device : devices())
    for (const Shape& shape : {Shape{300000}, Shape{3, 70000}, Shape{2, 9, 5000}, Shape{70000, 3}}) {
      const Tensor x = (arange(0, static_cast<double>(numel(shape)), 1, {f64, device}) * 7).to(u8).reshape(shape);
      for (int64_t axis = 0; axis < x.dim(); ++axis) {
        const Tensor sums = cumsum(x, axis), step = slice(sums, axis, 1, INT64_MAX) - slice(sums, axis, 0, -1);
        EXPECT_EQ(sum(ne(step, slice(x, axis, 1, INT64_MAX).to(i64))).item(), 0) << shape << ' ' << axis;
        EXPECT_EQ(sum(ne(sums.select(axis, 0), x.select(axis, 0).to(i64))).item(), 0) << shape << ' ' << axis;
        EXPECT_EQ(sum(ne(sums.select(axis, -1), sum(x, axis))).item(), 0) << shape << ' ' << axis;
      }
    }
}

TEST(Argmax, ReturnsFirstOfTiesAndNaN) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16, f16}) {
      const Tensor x = tensor({{1, 3, 3, 2}, {kNan, 5, kNan, 9}, {-kInf, -kInf, -kInf, -kInf}}, {dtype, device});
      EXPECT_EQ(argmax(x, -1).to_vector<int64_t>(), (Integers{1, 0, 0}));
      EXPECT_EQ(argmin(x, 1).to_vector<int64_t>(), (Integers{0, 0, 0}));
      EXPECT_EQ(argmax(x).item<int64_t>(), 4);
      EXPECT_EQ(argmin(x.slice(0, 1, 3)).item<int64_t>(), 0);
      EXPECT_TRUE(std::isnan(max(x, 1).values.at({1})));
    }
}

TEST(Argmax, AcceptsIntegersAndBool) {
  for (const Device device : devices())
    for (const DType dtype : {i64, i32, u8, b8}) {
      const Tensor x = tensor({{0, 1, 1}, {1, 0, 0}}, {dtype, device});
      EXPECT_EQ(argmax(x, 1).to_vector<int64_t>(), (Integers{1, 0})) << dtype;
      EXPECT_EQ(argmin(x, 0).to_vector<int64_t>(), (Integers{0, 1, 1})) << dtype;
      EXPECT_EQ(sort(x, 1, true).indices.to_vector<int64_t>(), (Integers{1, 2, 0, 0, 1, 2})) << dtype;
      EXPECT_EQ(max(x, 1).values.dtype(), dtype);
    }
}

TEST(Argmax, WithoutAxisReturnsRowMajorIndex) {
  for (const Device device : devices()) {
    const Tensor x = zeros({2, 3, 4, 5}, {f32, device}).contiguous(MemoryFormat::channels_last);
    x.set({1, 2, 0, 3}, 9);
    EXPECT_EQ(argmax(x).item<int64_t>(), 103);
    EXPECT_EQ(argmax(x, {}, true).shape(), (Shape{1, 1, 1, 1}));
    const Tensor many = zeros({3, 200001}, {f32, device});
    many.set({2, 131072}, -1);
    many.set({2, 131073}, -1);
    EXPECT_EQ(argmin(many).item<int64_t>(), 2 * 200001 + 131072);
    EXPECT_EQ(argmin(many, 1).to_vector<int64_t>(), (Integers{0, 0, 131072}));
  }
}

TEST(Sort, PutsNaNLastAndIsStable) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16, f16}) {
      const Tensor x = tensor({2, kNan, -0.0, kInf, 0, -kInf, kNan, 2, -3}, {dtype, device});
      EXPECT_EQ(x.sort().indices.to_vector<int64_t>(), (Integers{5, 8, 2, 4, 0, 7, 3, 1, 6})) << dtype;
      EXPECT_EQ(x.sort(0, true).indices.to_vector<int64_t>(), (Integers{1, 6, 3, 0, 7, 2, 4, 8, 5})) << dtype;
      EXPECT_EQ(x.topk(4).indices.to_vector<int64_t>(), (Integers{1, 6, 3, 0}));
      EXPECT_EQ(x.topk(2, 0, false).indices.to_vector<int64_t>(), (Integers{5, 8}));
      EXPECT_EQ(x.topk(0).values.shape(), Shape{0});
    }
}

// The shapes and dtypes cover every sorting algorithm. The values must ascend, the indices must match the values and
// form a permutation, and ties must keep their order.
TEST(Sort, HandlesLongAndManyLines) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, f16, i64, i32, u8}) {
      for (const Shape& shape : {Shape{100000}, Shape{5, 3000}, Shape{40, 33, 7}, Shape{2000, 3}, Shape{3, 4, 2000}}) {
        Generator generator(7);
        const Tensor x = (rand(shape, {}, &generator) * 1000).to(i64).to(dtype).to(device);
        for (int64_t axis = 0; axis < x.dim(); ++axis) {
          const Selection s = sort(x, axis);
          const auto pairs = [&](const Tensor& t) {
            return std::pair(slice(t, axis, 0, -1), slice(t, axis, 1, INT64_MAX));
          };
          const auto [a, b] = pairs(s.values);
          const auto [i, j] = pairs(s.indices);
          EXPECT_EQ(sum(gt(a, b)).item(), 0) << dtype << ' ' << shape << ' ' << axis;
          EXPECT_EQ(sum(mul(eq(a, b), gt(i, j))).item(), 0) << dtype << ' ' << shape << ' ' << axis;
          EXPECT_EQ(sum(ne(gather(x, axis, s.indices), s.values)).item(), 0);
          for (const int64_t k : {x.size(axis) / 20, x.size(axis) / 2})
            EXPECT_EQ(sum(ne(topk(x, k, axis, false).indices, slice(s.indices, axis, 0, k))).item(), 0) << k;
          EXPECT_EQ(sum(ne(sum(s.indices, axis), (x.size(axis) - 1) * x.size(axis) / 2)).item(), 0);
        }
      }
    }
}

TEST(Selections, AcceptTensorsWithoutAxes) {
  for (const Device device : devices()) {
    const Tensor x = full({}, 7, {f32, device, true});
    for (const Selection& s : {x.max(0), x.min(-1, true), x.sort(), x.topk(1, 0)}) {
      EXPECT_EQ(s.values.shape(), Shape{});
      EXPECT_EQ(s.indices.shape(), Shape{});
      EXPECT_EQ(s.indices.item<int64_t>(), 0);
      EXPECT_EQ(grad({s.values}, {x})[0].item(), 1);
    }
    EXPECT_EQ(x.argmax().shape(), Shape{});
    EXPECT_EQ(x.argmin(0, true).item<int64_t>(), 0);
    EXPECT_EQ(x.prod(0).item(), 7);
    EXPECT_EQ(x.norm().item(), 7);
    EXPECT_EQ(x.logsumexp(0).item(), 7);
    EXPECT_EQ(prelu(-x, full({1}, 0.5, {f32, device})).item(), -3.5);
  }
}

TEST(Max, SendsGradientToSelectedElementOnly) {
  const Tensor x = tensor({{1, 3, 3}, {2, 2, 0}}, {f64}).requires_grad_();
  EXPECT_EQ(grad({sum(x.max(1).values)}, {x})[0].to_vector(), (Doubles{0, 1, 0, 1, 0, 0}));
  EXPECT_EQ(grad({sum(x.amax(1))}, {x})[0].to_vector(), (Doubles{0, 0.5, 0.5, 0.5, 0.5, 0}));
}

TEST(Prelu, TreatsAxisOneOfMatricesAsChannels) {
  for (const Device device : devices()) {
    const Tensor w = tensor({0.5, 0.25}, {f32, device}).requires_grad_();
    const Tensor x = tensor({{-2, -8}, {3, -4}, {-6, 1}}, {f32, device}).requires_grad_(), y = prelu(x, w);
    EXPECT_EQ(y.to_vector(), (Doubles{-1, -2, 3, -1, -3, 1}));
    const Tensors grads = grad({sum(y)}, {x, w});
    EXPECT_EQ(grads[0].to_vector(), (Doubles{0.5, 0.25, 1, 0.25, 0.5, 1}));
    EXPECT_EQ(grads[1].to_vector(), (Doubles{-8, -12}));
  }
}

TEST(Prelu, WeightGradientIgnoresPositiveInputs) {
  const Tensor x = tensor({kInf, -2, 0}, {f32}).requires_grad_(), w = tensor({0.25}).requires_grad_();
  const Tensor y = prelu(x, w);
  EXPECT_EQ(y.to_vector(), (Doubles{kInf, -0.5, 0}));
  const Tensors grads = grad({sum(y)}, {x, w});
  EXPECT_EQ(grads[0].to_vector(), (Doubles{1, 0.25, 0.25}));
  EXPECT_EQ(grads[1].to_vector(), Doubles{-2});
}

TEST(Split, ReturnsViewsWithTheSizesOfPyTorch) {
  const Tensor x = zeros({7, 0, 2});
  const auto sizes = [](const Tensors& parts, int64_t axis) {
    Integers all;
    for (const Tensor& part : parts) all.push_back(part.size(axis));
    return all;
  };
  EXPECT_EQ(sizes(x.split(3), 0), (Integers{3, 3, 1}));
  EXPECT_EQ(sizes(x.split(3, 1), 1), (Integers{0}));
  EXPECT_EQ(sizes(x.split(0, 1), 1), (Integers{0}));
  EXPECT_EQ(sizes(x.split({1, 1}, -1), 2), (Integers{1, 1}));
  EXPECT_EQ(sizes(x.chunk(3), 0), (Integers{3, 3, 1}));
  EXPECT_EQ(sizes(x.chunk(5), 0), (Integers{2, 2, 2, 1}));
  EXPECT_EQ(sizes(x.chunk(3, 1), 1), (Integers{0, 0, 0}));
  const Tensor y = zeros({4});
  y.chunk(2)[1].fill_(5);
  EXPECT_EQ(y.to_vector(), (Doubles{0, 0, 5, 5}));
}

TEST(OneHot, InfersNumberOfClasses) {
  for (const Device device : devices()) {
    const Tensor index = tensor({0, 2, 1}, {i64, device});
    EXPECT_EQ(one_hot(index).to_vector<int64_t>(), (Integers{1, 0, 0, 0, 0, 1, 0, 1, 0}));
    EXPECT_EQ(one_hot(zeros({0}, {i64, device}), 3).shape(), (Shape{0, 3}));
  }
  EXPECT_ERROR(one_hot(tensor({0, 3}, {i64}), 3), "one_hot: index 3 is out of range");
}

// A negative axis or index gives the same result as the equivalent nonnegative axis or index.
TEST(NegativeAxes, CountFromTheEnd) {
  struct Form {
    const char* name;
    std::function<Tensor(const Tensor& x, int64_t axis)> function;
    int64_t added = 0;  // number of axes that the function adds
  };
  const auto index = [](const Tensor& x) { return zeros(x.shape(), {i64}); };
  const Form forms[] = {
      {"sum", [](const Tensor& x, int64_t a) { return sum(x, a); }},
      {"mean", [](const Tensor& x, int64_t a) { return mean(x, a); }},
      {"amax", [](const Tensor& x, int64_t a) { return amax(x, a); }},
      {"amin", [](const Tensor& x, int64_t a) { return amin(x, a); }},
      {"var", [](const Tensor& x, int64_t a) { return var(x, a); }},
      {"std", [](const Tensor& x, int64_t a) { return x.std(a); }},
      {"prod", [](const Tensor& x, int64_t a) { return x.prod(a); }},
      {"norm", [](const Tensor& x, int64_t a) { return x.norm(2, a); }},
      {"logsumexp", [](const Tensor& x, int64_t a) { return x.logsumexp(a); }},
      {"cumsum", [](const Tensor& x, int64_t a) { return x.cumsum(a); }},
      {"softmax", [](const Tensor& x, int64_t a) { return x.softmax(a); }},
      {"log_softmax", [](const Tensor& x, int64_t a) { return x.log_softmax(a); }},
      {"argmax", [](const Tensor& x, int64_t a) { return x.argmax(a); }},
      {"argmin", [](const Tensor& x, int64_t a) { return x.argmin(a, true); }},
      {"max", [](const Tensor& x, int64_t a) { return x.max(a).values; }},
      {"min", [](const Tensor& x, int64_t a) { return x.min(a, true).indices; }},
      {"sort", [](const Tensor& x, int64_t a) { return x.sort(a).values; }},
      {"topk", [](const Tensor& x, int64_t a) { return x.topk(2, a).values; }},
      {"transpose", [](const Tensor& x, int64_t a) { return x.transpose(0, a); }},
      {"squeeze", [](const Tensor& x, int64_t a) { return slice(x, a, 1, 2).squeeze(a); }},
      {"unsqueeze", [](const Tensor& x, int64_t a) { return x.unsqueeze(a); }, 1},
      {"narrow", [](const Tensor& x, int64_t a) { return x.narrow(a, -2, 1); }},
      {"slice", [](const Tensor& x, int64_t a) { return x.slice(a, -2, -1); }},
      {"select", [](const Tensor& x, int64_t a) { return x.select(a, -1); }},
      {"flatten", [](const Tensor& x, int64_t a) { return x.flatten(a, -1); }},
      {"flatten_to", [](const Tensor& x, int64_t a) { return x.flatten(0, a); }},
      {"split", [](const Tensor& x, int64_t a) { return x.split(2, a)[0]; }},
      {"split_in_sizes",
       [](const Tensor& x, int64_t a) {
         return x.split({x.size(a), 0}, a)[0];
       }},
      {"chunk", [](const Tensor& x, int64_t a) { return x.chunk(2, a)[1]; }},
      {"cat",
       [](const Tensor& x, int64_t a) {
         return cat({x, x}, a);
       }},
      {"stack",
       [](const Tensor& x, int64_t a) {
         return stack({x, x + 1}, a);
       },
       1},
      {"flip", [](const Tensor& x, int64_t a) { return flip(x, {a}); }},
      {"index_select",
       [](const Tensor& x, int64_t a) {
         return index_select(x, a, tensor({1, 0}, {i64}));
       }},
      {"gather", [=](const Tensor& x, int64_t a) { return gather(x, a, index(x)); }},
      {"scatter_add", [=](const Tensor& x, int64_t a) { return scatter_add(x, a, index(x), 2); }},
      {"size", [](const Tensor& x, int64_t a) { return full({}, static_cast<double>(x.size(a))); }},
  };
  const Tensor x = sin(arange(0, 24)).reshape({2, 3, 4});
  for (const Form& form : forms) {
    const int64_t rank = 3 + form.added;
    for (int64_t axis = 0; axis < rank; ++axis) {
      const Tensor a = form.function(x, axis), b = form.function(x, axis - rank);
      EXPECT_EQ(a.shape(), b.shape()) << form.name << ' ' << axis;
      EXPECT_EQ(a.to_vector(), b.to_vector()) << form.name << ' ' << axis;
    }
    SCOPED_TRACE(form.name);
    for (const int64_t axis : {-rank - 1, rank}) EXPECT_ERROR(form.function(x, axis), "out of range");
  }
  EXPECT_EQ(permute(x, {-1, -3, -2}).shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(x[-1].to_vector(), x[1].to_vector());
  EXPECT_EQ(x.at({-1, 0, -2}), x.at({1, 0, 2}));
  EXPECT_ERROR(x.at({-3, 0, 0}), "out of range");
  EXPECT_ERROR(x[2], "out of range");
  EXPECT_ERROR(x[-3], "out of range");
}

}  // namespace
}  // namespace voxgrad
