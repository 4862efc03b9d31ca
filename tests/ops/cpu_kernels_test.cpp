// Tests the CPU kernels that compute each element independently: elementwise operators, copies, fill, arange and random
// numbers. Also tests empty views and unsupported dtypes.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/detail/philox.h"
#include "tests/ops/cpu_kernels_support.h"

namespace voxgrad {
namespace {

using namespace kerneltest;

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

struct UnaryCase {
  UnaryOp op;
  double a;     // first parameter of the operator
  double b;     // second parameter
  double low;   // lower bound of the inputs
  double high;  // upper bound of the inputs
  double (*f)(double);
};
const UnaryCase kUnary[] = {
    {UnaryOp::affine, 2.5, -1, -3, 3, [](double x) { return 2.5 * x - 1; }},
    {UnaryOp::neg, 0, 0, -3, 3, [](double x) { return -x; }},
    {UnaryOp::abs, 0, 0, -3, 3, [](double x) { return std::abs(x); }},
    {UnaryOp::exp, 0, 0, -9, 9, [](double x) { return std::exp(x); }},
    {UnaryOp::log, 0, 0, 0, 9, [](double x) { return std::log(x); }},
    {UnaryOp::sqrt, 0, 0, 0, 9, [](double x) { return std::sqrt(x); }},
    {UnaryOp::rsqrt, 0, 0, 0.1, 9, [](double x) { return 1 / std::sqrt(x); }},
    {UnaryOp::reciprocal, 0, 0, 0.1, 9, [](double x) { return 1 / x; }},
    {UnaryOp::sin, 0, 0, -9, 9, [](double x) { return std::sin(x); }},
    {UnaryOp::cos, 0, 0, -9, 9, [](double x) { return std::cos(x); }},
    {UnaryOp::erf, 0, 0, -4, 4, [](double x) { return std::erf(x); }},
    {UnaryOp::sign, 0, 0, -1, 1, [](double x) { return x > 0   ? 1.0
                                                       : x < 0 ? -1.0
                                                               : 0.0; }},
    {UnaryOp::pow, 2.5, 0, 0, 3, [](double x) { return std::pow(x, 2.5); }},
    {UnaryOp::pow, 2, 0, -3, 3, [](double x) { return x * x; }},
    {UnaryOp::clamp, -1, 0.5, -3, 3, [](double x) { return std::min(std::max(x, -1.0), 0.5); }},
    {UnaryOp::relu, 0, 0, -3, 3, [](double x) { return std::max(x, 0.0); }},
    {UnaryOp::leaky_relu, 0.125, 0, -3, 3, [](double x) { return x > 0 ? x : 0.125 * x; }},
    {UnaryOp::sigmoid, 0, 0, -20, 20, logistic},
    {UnaryOp::tanh, 0, 0, -8, 8, [](double x) { return std::tanh(x); }},
    {UnaryOp::gelu, 0, 0, -6, 6, [](double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); }},
    {UnaryOp::silu, 0, 0, -9, 9, [](double x) { return x * logistic(x); }},
    {UnaryOp::softplus, 2, 6, -4, 4, [](double x) { return 2 * x > 6 ? x : std::log1p(std::exp(2 * x)) / 2; }},
};

TEST(CpuKernels, UnaryOpsHandleAnyStrides) {
  for_floats([]<class T>() {
    for (const UnaryCase& c : kUnary) {
      SCOPED_TRACE(concat("operator ", static_cast<int>(c.op), ' ', dtype_of<T>));
      for (Layout in_layout : kInputLayouts)
        for (Layout out_layout : kOutputLayouts) {
          Array<T> in({3, 5, 67}, in_layout), out({3, 5, 67}, out_layout);
          in.random(c.low, c.high);
          cpu_table.unary(c.op, out.view, in.view, c.a, c.b);
          expect_close<T>(
              out, [&](const Dims& i) { return c.f(static_cast<double>(in(i))); }, tolerance<T>());
        }
    }
  });
}

TEST(CpuKernels, UnaryOpsHandleExtremeValues) {
  const struct {
    UnaryOp op;
    std::vector<double> in, out;
  } cases[] = {
      {UnaryOp::relu, {kNaN, -kInf, kInf}, {kNaN, 0, kInf}},
      {UnaryOp::clamp, {kNaN, -kInf, kInf}, {kNaN, -1, 2}},
      {UnaryOp::exp, {kNaN, -kInf, kInf, -120, 0}, {kNaN, 0, kInf, 0, 1}},
      {UnaryOp::sigmoid, {kNaN, -kInf, kInf, -200, 200}, {kNaN, 0, 1, 0, 1}},
      {UnaryOp::tanh, {kNaN, -kInf, kInf, 40}, {kNaN, -1, 1, 1}},
      {UnaryOp::abs, {kNaN, -kInf, -0.0}, {kNaN, kInf, 0}},
      {UnaryOp::sign, {kNaN, -kInf, 0.0}, {kNaN, -1, 0}},
  };
  for_floats([&]<class T>() {
    for (const auto& c : cases) {
      Array<T> in({static_cast<int64_t>(c.in.size())}), out(in.shape());
      for (size_t i = 0; i < c.in.size(); ++i) in({static_cast<int64_t>(i)}) = static_cast<T>(c.in[i]);
      cpu_table.unary(c.op, out.view, in.view, -1, 2);
      expect_close<T>(
          out, [&](const Dims& i) { return c.out[static_cast<size_t>(i[0])]; }, 1e-37);
    }
  });
  Array<int64_t> in({7}), out({7});
  in.random(-50, 50);
  cpu_table.unary(UnaryOp::clamp, out.view, in.view, -kInf, 3);
  expect_close<int64_t>(
      out, [&](const Dims& i) { return std::min<double>(3, static_cast<double>(in(i))); }, 0);
  Array<Float16> half({1});
  half({0}) = Float16(65504.f);
  Array<bool> finite({1});
  cpu_table.unary(UnaryOp::isfinite, finite.view, half.view, 0, 0);
  EXPECT_TRUE(finite({0}));
}

struct BinaryCase {
  BinaryOp op;
  double a;  // first parameter of the operator
  double b;  // second parameter
  double (*f)(double, double);
};
const BinaryCase kBinary[] = {
    {BinaryOp::add, 0, 0, [](double x, double y) { return x + y; }},
    {BinaryOp::sub, 0, 0, [](double x, double y) { return x - y; }},
    {BinaryOp::mul, 0, 0, [](double x, double y) { return x * y; }},
    {BinaryOp::maximum, 0, 0, [](double x, double y) { return std::max(x, y); }},
    {BinaryOp::minimum, 0, 0, [](double x, double y) { return std::min(x, y); }},
    {BinaryOp::div, 0, 0, [](double x, double y) { return x / y; }},
    {BinaryOp::relu_grad, 0, 0, [](double g, double y) { return y > 0 ? g : 0; }},
    {BinaryOp::leaky_relu_grad, 0.25, 0, [](double g, double y) { return y > 0 ? g : g * 0.25; }},
    {BinaryOp::sigmoid_grad, 0, 0, [](double g, double y) { return g * y * (1 - y); }},
    {BinaryOp::tanh_grad, 0, 0, [](double g, double y) { return g * (1 - y * y); }},
    {BinaryOp::gelu_grad, 0, 0,
     [](double g, double x) {
       return g * (0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI));
     }},
    {BinaryOp::silu_grad, 0, 0, [](double g, double x) { return g * (logistic(x) + x * logistic(x) * logistic(-x)); }},
    {BinaryOp::softplus_grad, 2, 3, [](double g, double x) { return 2 * x > 3 ? g : g * logistic(2 * x); }},
    {BinaryOp::clamp_grad, -1, 1, [](double g, double x) { return std::abs(x) <= 1 ? g : 0; }},
};

TEST(CpuKernels, BinaryOpsBroadcast) {
  for_floats([]<class T>() {
    for (const BinaryCase& c : kBinary) {
      SCOPED_TRACE(concat("operator ", static_cast<int>(c.op), ' ', dtype_of<T>));
      for (Layout layout : kInputLayouts)
        for (int broadcast_axis = -1; broadcast_axis < 3; ++broadcast_axis) {
          Array<T> x({3, 5, 33}, layout), y({3, 5, 33}), out({3, 5, 33}, kOutputLayouts[(broadcast_axis + 1) % 3]);
          x.random(-3, 3);
          y.random(-3, 3, 2);
          if (broadcast_axis >= 0) y.view.stride[broadcast_axis] = 0;
          cpu_table.binary(c.op, out.view, x.view, y.view, c.a, c.b);
          const auto expected = [&](const Dims& i) {
            return c.f(static_cast<double>(x(i)), static_cast<double>(y(i)));
          };
          expect_close<T>(out, expected, 2 * tolerance<T>());
        }
    }
  });
}

TEST(CpuKernels, ComparisonsAndWhereMatchReference) {
  Array<int32_t> x({4, 9}, Layout::reversed), y({4, 9});
  x.random(-2, 3);
  y.random(-2, 3, 2);
  const std::pair<BinaryOp, bool (*)(int, int)> cases[] = {
      {BinaryOp::eq, [](int a, int b) { return a == b; }}, {BinaryOp::ne, [](int a, int b) { return a != b; }},
      {BinaryOp::lt, [](int a, int b) { return a < b; }},  {BinaryOp::le, [](int a, int b) { return a <= b; }},
      {BinaryOp::gt, [](int a, int b) { return a > b; }},  {BinaryOp::ge, [](int a, int b) { return a >= b; }},
  };
  for (const auto& [op, f] : cases) {
    Array<bool> out({4, 9}, Layout::stepped);
    cpu_table.binary(op, out.view, x.view, y.view, 0, 0);
    expect_close<bool>(
        out, [&, &compare = f](const Dims& i) { return compare(x(i), y(i)); }, 0);
    Array<int32_t> chosen({4, 9});
    cpu_table.where(chosen.view, out.view, x.view, y.view);
    expect_close<int32_t>(
        chosen, [&](const Dims& i) { return out(i) ? x(i) : y(i); }, 0);
  }
  Array<float> a({2}), b({2}), top({2});
  a({0}) = b({1}) = static_cast<float>(kNaN);
  cpu_table.binary(BinaryOp::maximum, top.view, a.view, b.view, 0, 0);
  expect_close<float>(
      top, [](const Dims&) { return kNaN; }, 0);
}

/// Calls f.operator()<T>() for all dtypes.
template <class F>
void for_types(F f) {
  for_all_floats(f);
  f.template operator()<int64_t>();
  f.template operator()<int32_t>();
  f.template operator()<uint8_t>();
  f.template operator()<bool>();
}

TEST(CpuKernels, CopyConvertsBetweenAllDtypes) {
  for_types([]<class From>() {
    for_types([]<class To>() {
      for (Layout layout : {Layout::contiguous, Layout::reversed, Layout::flipped, Layout::expanded}) {
        Array<From> in({3, 7, 5}, layout);
        Array<To> out({3, 7, 5}, Layout::stepped);
        in.random(0, 100);
        cpu_table.copy(out.view, in.view);
        const auto expected = [&](const Dims& i) {
          const double x = static_cast<double>(in(i));
          if constexpr (std::is_same_v<To, bool>) return x != 0 ? 1.0 : 0.0;
          if constexpr (std::is_integral_v<To>) return std::trunc(x);
          return static_cast<double>(static_cast<To>(static_cast<float>(x)));
        };
        expect_close<To>(out, expected, 0);
      }
    });
  });
}

TEST(CpuKernels, CopyTransposesAxes) {
  for_types([]<class T>() {
    for (Layout in_layout : {Layout::contiguous, Layout::reversed})
      for (Layout out_layout : {Layout::contiguous, Layout::reversed}) {
        Array<T> in({3, 37, 2, 65}, in_layout), out({3, 37, 2, 65}, out_layout);
        in.random(0, 100);
        cpu_table.copy(out.view, in.view);
        expect_close<T>(
            out, [&](const Dims& i) { return static_cast<double>(in(i)); }, 0);
      }
  });
}

TEST(CpuKernels, FillArangeAndEmptyViewsMatchReference) {
  Array<uint8_t> filled({3, 5}, Layout::stepped);
  cpu_table.fill(filled.view, 9);
  expect_close<uint8_t>(
      filled, [](const Dims&) { return 9; }, 0);
  Array<int32_t> range({70});
  cpu_table.arange(range.view, 3, -2);
  expect_close<int32_t>(
      range, [](const Dims& i) { return static_cast<double>(3 - 2 * i[0]); }, 0);

  Array<float> none({3, 0, 2}), scalar(Shape{}), result(Shape{});
  cpu_table.unary(UnaryOp::exp, none.view, none.view, 0, 0);
  cpu_table.copy(none.view, none.view);
  scalar({}) = 4;
  cpu_table.unary(UnaryOp::sqrt, result.view, scalar.view, 0, 0);
  EXPECT_EQ(result({}), 2);
  Array<float> sums({3, 1, 2});
  cpu_table.reduce(ReduceOp::sum, sums.view, none.view);
  expect_close<float>(
      sums, [](const Dims&) { return 0; }, 0);
}

TEST(CpuKernels, RandomNumbersFollowThePhiloxStream) {
  for_all_floats([]<class T>() {
    Array<T> u({1001}), n({1001});
    cpu_table.uniform(u.view, {7, 11});
    cpu_table.normal(n.view, {7, 11});
    const auto at = [](const Dims& i) { return static_cast<uint64_t>(i[0]); };
    expect_close<T>(
        u, [&](const Dims& i) { return static_cast<double>(philox_uniform<T>(7, 11, at(i))); }, 0);
    expect_close<T>(
        n, [&](const Dims& i) { return static_cast<double>(philox_normal<T>(7, 11, at(i))); },
        std::max(1e-6, 2 * tolerance<T>()));
  });
}

TEST(CpuKernels, UniformStaysBelowOne) {
  for_all_floats([]<class T>() {
    Array<T> u({1 << 16});
    cpu_table.uniform(u.view, {3, 0});
    double largest = 0, total = 0;
    u.visit([&](const Dims& i) {
      const auto x = static_cast<double>(u(i));
      largest = std::max(largest, x);
      total += x;
    });
    EXPECT_LT(largest, 1) << dtype_of<T>;
    EXPECT_GT(largest, 0.995) << dtype_of<T>;
    EXPECT_NEAR(total / (1 << 16), 0.5, 4e-3) << dtype_of<T>;
  });
}

TEST(CpuKernels, RejectsUnsupportedDtypes) {
  Array<int32_t> x({2}), y({2});
  EXPECT_ERROR(cpu_table.unary(UnaryOp::relu, y.view, x.view, 0, 0), "relu has no CPU kernel for i32");
  EXPECT_ERROR(cpu_table.binary(BinaryOp::div, y.view, x.view, x.view, 0, 0), "div has no CPU kernel for i32");
  EXPECT_ERROR(cpu_table.softmax(y.view, x.view, 0, false), "softmax has no CPU kernel for i32");
}

}  // namespace
}  // namespace voxgrad
