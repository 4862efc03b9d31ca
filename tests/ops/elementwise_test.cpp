// Tests properties of elementwise operators that the operator table does not cover: zero, NaN, overflow, scalar
// operands, dtype promotion, and in-place operators such as +=. The expected gradients are PyTorch's unless a comment
// states a difference.
#include "ops/elementwise.h"

#include <cmath>
#include <limits>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void expect_equal(const Tensor& got, const std::vector<double>& expected, const char* what) {
  const std::vector<double> values = got.to_vector();
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(expected[i]))
      EXPECT_TRUE(std::isnan(values[i])) << what << " at " << i << ": " << values[i];
    else
      EXPECT_DOUBLE_EQ(values[i], expected[i]) << what << " at " << i;
  }
}

Tensor leaf(const NestedList& values, Device device) { return tensor(values, {f64, device, true}); }

TEST(Elementwise, ExpHandlesUnderflowInfinityAndNaN) {
  for (const Device device : devices()) {
    const Tensor x = tensor({-kInf, -2000, -745.2, kInf, kNaN}, {f64, device});
    expect_equal(exp(x), {0, 0, 0, kInf, kNaN}, "f64");
    expect_equal(exp(x.to(f32)), {0, 0, 0, kInf, kNaN}, "f32");
    for (const double tiny : {-740.0, -710.0, -708.5})
      EXPECT_NEAR(exp(full({}, tiny, {f64, device})).item() / std::exp(tiny), 1, 0.01) << tiny;
  }
}

TEST(Elementwise, SoftmaxIsZeroAtMaskedElements) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64})
      for (const int64_t length : {4, 100}) {  // short and long rows use different loops
        const Tensor x = zeros({2, length}, {dtype, device});
        x.slice(1, 1, length, 2).fill_(-kInf);
        for (const Tensor& y : {softmax(x, 1), softmax(x.transpose(0, 1), 0)}) {
          EXPECT_EQ(eq(y, 0).to(i64).sum().item<int64_t>(), length) << dtype << ' ' << length;
          EXPECT_NEAR(y.sum().item(), 2, 1e-6);
        }
      }
}

TEST(Elementwise, PowHasPyTorchGradientsAtZeroAndNaN) {
  for (const Device device : devices()) {
    const Tensor x = leaf({0, 0, 0, 0, 0, -1, 2, kNaN}, device);
    const Tensor y = leaf({0, 1, 2, -1, 0.5, 2, 0, 0}, device);
    const Tensors slopes = grad({pow(x, y).sum()}, {x, y}, {}, true, true);
    expect_equal(slopes[0], {0, 1, 0, -kInf, kInf, -2, 0, 0}, "d/dx");
    expect_equal(slopes[1], {0, 0, 0, -kInf, 0, kNaN, std::log(2.0), kNaN}, "d/dy");
    const auto second = [&](size_t first, const Tensor& in) {
      return grad({slopes[first].slice(0, 1, 3).sum()}, {in}, {}, true)[0].slice(0, 0, 3);
    };
    expect_equal(second(0, x), {0, 0, 2}, "d2/dx2");
    expect_equal(second(0, y), {0, 1, 0}, "d2/dxdy");
    expect_equal(second(1, x), {0, 0, 0}, "d2/dydx");  // PyTorch returns NaN
    expect_equal(second(1, y), {0, 0, 0}, "d2/dy2");   // PyTorch returns NaN
  }
}

TEST(Elementwise, PassesGradientsToNaNAsInPyTorch) {
  for (const Device device : devices()) {
    using Function = Tensor (*)(const Tensor&, const Tensor&);
    for (const Function function : {Function(maximum), Function(minimum)}) {
      const Tensor x = leaf({kNaN, 1, kNaN, 1}, device), y = leaf({1, kNaN, kNaN, 1}, device);
      function(x, y).sum().backward();
      expect_equal(x.grad(), {1, 1, 1, 0.5}, "first");
      expect_equal(y.grad(), {1, 1, 1, 0.5}, "second");
    }
    const Tensor x = leaf({kNaN, 0, 2, 1}, device);
    clamp(x, -1, 1).sum().backward();
    expect_equal(x.grad(), {0, 1, 0, 1}, "clamp");
  }
}

TEST(Elementwise, IntegersWrapAround) {
  for (const Device device : devices())
    for (const DType dtype : {i32, i64}) {
      const auto integers = [&](std::vector<int64_t> values) {
        return from_span<int64_t>(values, {static_cast<int64_t>(values.size())}, device).to(dtype);
      };
      const int64_t largest = dtype == i32 ? INT32_MAX : INT64_MAX, smallest = -largest - 1;
      const Tensor x = integers({largest, smallest, smallest, largest});
      const auto expect = [&](const Tensor& got, const std::vector<int64_t>& expected, const char* what) {
        EXPECT_EQ(got.to_vector<int64_t>(), expected) << what << ' ' << dtype;
      };
      expect(x + integers({1, -1, smallest, largest}), {smallest, largest, 0, -2}, "add");
      expect(x - integers({-1, 1, largest, smallest}), {smallest, largest, 1, -1}, "sub");
      expect(x * integers({2, 2, -1, largest}), {-2, 0, smallest, 1}, "mul");
      expect(-x, {-largest, smallest, smallest, -largest}, "neg");
      expect(abs(x), {largest, smallest, smallest, largest}, "abs");
      expect(affine(x, 3, 5), {smallest + 2, smallest + 5, smallest + 5, smallest + 2}, "affine");
      expect(x.clone().add_(x, 2), {largest - 2, smallest, smallest, largest - 2}, "add_");
      expect(clamp(x, -std::numeric_limits<double>::infinity(), 7), {7, smallest, smallest, 7}, "clamp");
    }
  const Tensor largest = full({100}, 0x1p62, {.dtype = i64});
  for (const Device device : devices()) EXPECT_EQ(largest.to(device).sum().item<int64_t>(), 0);
}

TEST(Elementwise, ComparesTensorsWithScalars) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, i64, u8}) {
      const Tensor x = tensor({1, 2, 3}, {dtype, device});
      expect_equal(eq(x, 2), {0, 1, 0}, "eq");
      expect_equal(ne(x, 2), {1, 0, 1}, "ne");
      expect_equal(lt(x, 2), {1, 0, 0}, "lt");
      expect_equal(le(x, 2), {1, 1, 0}, "le");
      expect_equal(gt(x, 2), {0, 0, 1}, "gt");
      expect_equal(ge(x, 2), {0, 1, 1}, "ge");
    }
}

TEST(Elementwise, DtypesPromoteAsInPyTorch) {
  EXPECT_EQ(cat({ones({2}, {bf16}), ones({2}, {f16}), ones({2}, {i64})}).dtype(), f32);
  const auto vector = [](DType dtype) { return ones({2}, {.dtype = dtype}); };
  const auto scalar = [](DType dtype) { return ones({}, {.dtype = dtype}); };
  EXPECT_EQ((vector(b8) * vector(f32)).dtype(), f32);
  EXPECT_EQ((vector(bf16) + vector(f32)).dtype(), f32);
  EXPECT_EQ((vector(bf16) + vector(f16)).dtype(), f32);
  EXPECT_EQ((vector(f16) + vector(i64)).dtype(), f16);
  EXPECT_EQ((vector(u8) + vector(i32)).dtype(), i32);
  EXPECT_EQ((vector(i32) + vector(i64)).dtype(), i64);
  EXPECT_EQ((vector(i64) / vector(i64)).dtype(), f32);
  EXPECT_EQ((vector(f32) + scalar(f64)).dtype(), f32);  // the operand with axes determines the dtype
  EXPECT_EQ((vector(i32) + scalar(f64)).dtype(), f64);
  EXPECT_EQ((scalar(i64) + vector(b8)).dtype(), i64);
  EXPECT_EQ(maximum(vector(i32), vector(f32)).dtype(), f32);
  EXPECT_EQ(where(vector(b8), vector(i32), vector(bf16)).dtype(), bf16);
  EXPECT_EQ((vector(i32) * 0.5).to_vector(), (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ((vector(i32) * 0.5).dtype(), f32);
  EXPECT_EQ((vector(i32) * 2.0).dtype(), f32);
  EXPECT_EQ((vector(i32) * 2).dtype(), i32);
  EXPECT_EQ((vector(u8) - 1).to_vector(), (std::vector<double>{0, 0}));
  EXPECT_EQ((3 - vector(u8)).dtype(), u8);
  EXPECT_EQ((vector(b8) + 1).dtype(), i64);
  EXPECT_EQ((vector(bf16) + 1.5).dtype(), bf16);
  EXPECT_EQ(lt(vector(i32), 1.5).to_vector(), (std::vector<double>{1, 1}));
  // Each gradient has the dtype of its operand.
  const Tensor x = vector(bf16).requires_grad_(), y = vector(f32).requires_grad_();
  sum(x * y).backward();
  EXPECT_EQ(x.grad().dtype(), bf16);
  EXPECT_EQ(y.grad().dtype(), f32);
}

TEST(Elementwise, OperatorsAndScalarsGiveExpectedValues) {
  const Tensor x = tensor({{1, -2, 3}, {4, 5, -6}});
  EXPECT_EQ((x > 0).to_vector(), (std::vector<double>{1, 0, 1, 1, 1, 0}));
  EXPECT_EQ((x <= -x).to_vector(), (std::vector<double>{0, 1, 0, 0, 0, 1}));
  EXPECT_EQ(maximum(x, 0.0).to_vector(), (std::vector<double>{1, 0, 3, 4, 5, 0}));
  EXPECT_EQ(where(x > 0, x, 0.0).to_vector(), (std::vector<double>{1, 0, 3, 4, 5, 0}));
  EXPECT_EQ(where(x > 0, 7, x).to_vector(), (std::vector<double>{7, -2, 7, 7, 7, -6}));
  EXPECT_EQ(x[0].to_vector(), (std::vector<double>{1, -2, 3}));
  EXPECT_EQ(x[-1][2].item(), -6);
  EXPECT_EQ(x.sum(1).to_vector(), (std::vector<double>{2, 3}));
  EXPECT_EQ(mean(x, -1, true).shape(), (Shape{2, 1}));
  EXPECT_EQ(x.reshape(std::vector<int64_t>{3, 2}).shape(), (Shape{3, 2}));
  EXPECT_EQ((2 / tensor({1, 4})).to_vector(), (std::vector<double>{2, 0.5}));
  EXPECT_EQ((0.5 < x[0]).to_vector(), (std::vector<double>{1, 0, 1}));
  const Tensor mask = x > 0;
  EXPECT_EQ((mask * true).dtype(), b8);
}

// A scalar operand is not rounded to half precision, because many scalars exceed the range of f16.
TEST(Elementwise, DoesNotRoundScalarsToHalfPrecision) {
  const Tensor x = tensor({0.5, 1000}).to(f16);
  EXPECT_EQ((x * 70000)[0].item(), 35008);
  EXPECT_EQ((x / 65536.0)[1].item(), static_cast<float>(Float16(1000 / 65536.f)));
  Tensor y = x.clone();
  y /= 65536.0;
  EXPECT_EQ(y.to_vector(), (x / 65536.0).to_vector());
  EXPECT_EQ((x < 70000).to_vector(), (std::vector<double>{1, 1}));
  EXPECT_EQ((tensor(1.0).to(bf16) < 1.001).item(), 1);
  // The gradients below are in the range of f16, but intermediate values of their computation exceed this range.
  const Tensor d = full({1}, 1000, {.dtype = f16}).requires_grad_();
  EXPECT_NEAR(grad({d.detach() / d}, {d}, {full({1}, 100, {.dtype = f16})})[0].item(), -0.1, 1e-4);
  const Tensor flat = zeros({70000}, {.dtype = f16, .requires_grad = true});
  EXPECT_NEAR(grad({amax(flat)}, {flat})[0][5].item(), 1 / 70000.0, 1e-7);
}

TEST(Elementwise, CompoundAssignmentWritesInPlaceUnlessRecorded) {
  Tensor x = tensor({1, 2});
  const Tensor same = x;
  x += tensor({10, 20});
  x -= 1;
  x *= tensor(2.0);
  x /= 4.0;
  EXPECT_EQ(same.to_vector(), (std::vector<double>{5, 10.5}));
  Tensor integers = ones({2}, {.dtype = i32});
  EXPECT_ERROR(integers += tensor({0.5, 1}),
               "operator+=: a result of f32 cannot be written to the target [2] i32 on cpu");
  EXPECT_ERROR(integers /= 2, "operator/=: a result of f32 cannot be written to the target [2] i32 on cpu");
  EXPECT_ERROR(x += ones({3, 2}),
               "operator+=: a result of shape [3, 2] cannot be written to the target [2] f32 on cpu");
  // On a recorded tensor, += creates a new tensor and records the addition.
  const Tensor leaf = ones({2}).requires_grad_();
  Tensor y = leaf * 3.0;
  const Tensor before = y;
  y += leaf;
  EXPECT_EQ(before.to_vector(), (std::vector<double>{3, 3}));
  EXPECT_EQ(grad({sum(y)}, {leaf})[0].to_vector(), (std::vector<double>{4, 4}));
  Tensor weight = leaf;
  EXPECT_ERROR(weight += 1.0, "operator+=: an in-place write is not recorded");
  EXPECT_ERROR(weight *= weight, "operator*=: an in-place write is not recorded");
}

}  // namespace
}  // namespace voxgrad
