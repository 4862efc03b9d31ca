// Tests every case of the operator table (op_cases.h) on every device: values against the reference, gradients and
// second gradients against finite differences, memory layouts, edge sizes, reproducibility, the number of threads, and
// the GPU against the CPU. Without a GPU, the CUDA tests are skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/autograd.h"
#include "core/thread_pool.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/gradcheck.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/ops/op_cases.h"
#include "tests/support.h"

namespace voxgrad::optest {
namespace {

constexpr double kDoubleTolerance = 1e-11;

Tensors converted(const Tensors& inputs, Device device, DType dtype) {
  Tensors result;
  for (const Tensor& input : inputs)
    result.push_back(input.to(device, is_floating(input.dtype()) ? dtype : input.dtype()));
  return result;
}

/// Expects |result - expected| <= tolerance * max(1, largest finite expected value). NaN equals NaN.
void expect_close(const Tensor& result, const Array& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(result.shape(), expected.shape) << what;
  const std::vector<double> values = result.to_vector();
  double largest = 1;
  for (double value : expected.values)
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    const double a = values[i], b = expected.values[i];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    ASSERT_LE(std::fabs(a - b), tolerance * largest) << what << ": element " << i << " is " << a << ", expected " << b;
  }
}

/// Returns the gradient of sum(result * weights) with respect to each differentiable input. The weights are fixed
/// numbers that are rounded to the dtype `rounded`.
Tensors gradients(const OpCase& op_case, const Tensors& inputs, DType rounded = f64) {
  Tensors given, leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    given.push_back(inputs[i]);
    if (!op_case.inputs[i].is_floating() || !op_case.inputs[i].differentiable) continue;
    given.back() = inputs[i].detach().requires_grad_();
    leaves.push_back(given.back());
  }
  const Tensor out = op_case.function(given);
  const Tensor count = arange(1, static_cast<double>(out.numel()) + 1, 1, {f64, out.device()});
  return grad({out}, leaves, {reshape(sin(count).to(rounded).to(out.dtype()), out.shape())});
}

/// Returns an equal tensor whose axes are reversed in memory.
Tensor reversed_axes(const Tensor& x) {
  Dims order;
  for (int64_t i = x.dim() - 1; i >= 0; --i) order.push_back(i);
  return x.permute(order).contiguous().permute(order);
}
/// Returns an equal tensor that uses every other element of its storage.
Tensor every_other(const Tensor& x) {
  const Tensor doubled = stack({x, zeros_like(x)}, x.dim());
  return doubled.select(x.dim(), 0);
}
Tensor channels_last(const Tensor& x) { return x.dim() >= 3 ? x.contiguous(MemoryFormat::channels_last) : x; }

struct Parameter {
  const OpCase* op_case;
  DeviceType device;
};

class OpTable : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceType::cuda && !cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  }
  const OpCase& op() const { return *GetParam().op_case; }
  Device device() const { return {GetParam().device, 0}; }
  Tensors inputs(DType dtype) const { return converted(make_inputs(op()), device(), dtype); }
};

TEST_P(OpTable, MatchesReference) {
  Arrays arrays;
  for (const Tensor& input : make_inputs(op())) arrays.push_back(reference::array_of(input));
  for (const DType dtype : {f64, f32}) {
    const Tensor out = op().function(inputs(dtype));
    const double tolerance = op().exact ? 0 : dtype == f64 ? kDoubleTolerance : op().tolerance;
    if (op().reference) {
      expect_close(out, op().reference(arrays), tolerance, name(dtype));
    } else {  // without a reference, compare with the CPU
      const Tensor cpu = op().function(converted(make_inputs(op()), Device::cpu(), dtype));
      expect_close(out, reference::array_of(cpu), tolerance, name(dtype));
    }
  }
}

/// Returns half the distance between 1 and the next larger number of the dtype.
double half_ulp(DType half) { return half == bf16 ? 0x1p-8 : 0x1p-11; }

// The inputs are rounded to half precision first, so that only the rounding errors of the operator remain.
TEST_P(OpTable, MatchesReferenceInHalfPrecision) {
  for (const DType dtype : {bf16, f16}) {
    const Tensors halves = inputs(dtype), exact = converted(halves, device(), f64);
    const Tensor out = op().function(halves);
    Arrays arrays;
    for (const Tensor& input : exact) arrays.push_back(reference::array_of(input));
    // Without a reference, compare with f32: random functions draw the same numbers in f32 and half precision, apart
    // from rounding.
    const Array expected =
        op().reference ? op().reference(arrays) : reference::array_of(op().function(converted(halves, device(), f32)));
    expect_close(out, expected, op().roundings * half_ulp(dtype) + op().tolerance, name(dtype));
    if (!op().differentiable) continue;
    const Tensors grads = gradients(op(), halves, dtype), expected_grads = gradients(op(), exact, dtype);
    constexpr int kRoundings = 4;  // roundings of the gradient and of intermediate gradients
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_EQ(grads[i].dtype(), dtype);
      expect_close(grads[i], reference::array_of(expected_grads[i]),
                   (op().roundings + kRoundings) * half_ulp(dtype) + 10 * op().tolerance,
                   concat(dtype, " gradient ", i));
    }
  }
}

TEST_P(OpTable, GradientsAgreeAcrossDevices) {
  if (!op().differentiable) GTEST_SKIP() << "not differentiable";
  if (GetParam().device == DeviceType::cpu) GTEST_SKIP() << "the CPU is the reference";
  for (const DType dtype : {f64, f32, bf16, f16}) {
    const Tensors cpu = gradients(op(), converted(make_inputs(op()), Device::cpu(), dtype), dtype);
    const Tensors grads = gradients(op(), inputs(dtype), dtype);
    const bool half = dtype == bf16 || dtype == f16;
    const double tolerance = half ? 4 * half_ulp(dtype) : 10 * op().tolerance;
    for (size_t i = 0; i < grads.size(); ++i)
      expect_close(grads[i], reference::array_of(cpu[i]), dtype == f64 ? kDoubleTolerance : tolerance,
                   concat(dtype, " gradient ", i));
  }
}

/// Marks the differentiable inputs as requiring gradients.
Tensors with_gradients(const OpCase& op_case, Tensors inputs) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (op_case.inputs[i].is_floating() && op_case.inputs[i].differentiable) inputs[i].requires_grad_();
  return inputs;
}

TEST_P(OpTable, PassesGradcheck) {
  if (!op().differentiable) GTEST_SKIP() << "not differentiable";
  const auto function = [&](const Tensors& t) { return Tensors{op().function(t)}; };
  const GradcheckReport report = gradcheck(function, with_gradients(op(), inputs(f64)));
  EXPECT_TRUE(report.passed) << report.message;
  if (op().function(inputs(f64)).numel() > 0) {
    EXPECT_GT(report.checked, 0);
  }
}

TEST_P(OpTable, PassesGradgradcheck) {
  if (!op().differentiable) GTEST_SKIP() << "not differentiable";
  const auto function = [&](const Tensors& t) { return Tensors{op().function(t)}; };
  if (op().once_differentiable) {
    EXPECT_ERROR(gradgradcheck(function, with_gradients(op(), inputs(f64))), "cannot be differentiated again");
    return;
  }
  const GradcheckReport report = gradgradcheck(function, with_gradients(op(), inputs(f64)));
  EXPECT_TRUE(report.passed) << report.message;
}

TEST_P(OpTable, AcceptsStridedAndChannelsLastInputs) {
  const Tensors plain = inputs(f64);
  const Array expected = reference::array_of(op().function(plain));
  Arrays expected_grads;
  if (op().differentiable)
    for (const Tensor& g : gradients(op(), plain)) expected_grads.push_back(reference::array_of(g));

  using Layout = Tensor (*)(const Tensor&);
  const std::pair<const char*, Layout> layouts[] = {
      {"reversed axes", reversed_axes}, {"every other element", every_other}, {"channels last", channels_last}};
  for (const auto& [what, layout] : layouts) {
    Tensors stored;
    for (const Tensor& x : plain) stored.push_back(layout(x));
    const Tensor out = op().function(stored);
    expect_close(out, expected, op().exact ? 0 : kDoubleTolerance, what);
    if (layout == channels_last && op().keeps_layout && plain[0].dim() >= 3 &&
        !plain[0].is_contiguous(MemoryFormat::channels_last)) {
      EXPECT_TRUE(out.is_contiguous(MemoryFormat::channels_last)) << "strides " << out.strides();
    }
    if (!op().differentiable) continue;
    const Tensors grads = gradients(op(), stored);
    for (size_t i = 0; i < grads.size(); ++i)
      expect_close(grads[i], expected_grads[i], kDoubleTolerance, concat(what, ", gradient ", i));
  }
}

TEST_P(OpTable, AcceptsEmptyAndSizeOneAxes) {
  if (op().edges.empty()) GTEST_SKIP() << "no edge sizes in the table";
  for (const std::vector<Shape>& shapes : op().edges) {
    const Tensors cpu = make_inputs(op(), shapes);
    Arrays arrays;
    for (const Tensor& x : cpu) arrays.push_back(reference::array_of(x));
    const Tensors placed = converted(cpu, device(), f64);
    const std::string what = concat("first input ", shapes[0]);
    const Tensor out = op().function(placed);
    if (op().reference) expect_close(out, op().reference(arrays), kDoubleTolerance, what);
    if (!op().differentiable) continue;
    const Tensors grads = gradients(op(), placed);
    size_t next = 0;
    for (size_t i = 0; i < placed.size(); ++i)
      if (op().inputs[i].is_floating() && op().inputs[i].differentiable) {
        EXPECT_EQ(grads[next++].shape(), placed[i].shape()) << what;
      }
  }
}

/// Returns the bits of the result and of all gradients, converted to f32.
std::vector<uint32_t> bits_of(const OpCase& op_case, const Tensors& inputs) {
  Tensors results{op_case.function(inputs)};
  if (op_case.differentiable)
    for (const Tensor& g : gradients(op_case, inputs)) results.push_back(g);
  std::vector<uint32_t> bits;
  for (const Tensor& result : results)
    for (const float value : result.to_vector<float>()) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

TEST_P(OpTable, IsBitwiseReproducible) {
  const Tensors x = inputs(f32);
  const std::vector<uint32_t> first = bits_of(op(), x);
  for (int run = 0; run < 3; ++run) EXPECT_EQ(bits_of(op(), x), first);
}

// Loops with the few elements of the cases would use one thread only, so the test makes them ignore their grain.
TEST(OpTableCases, ResultsDoNotDependOnThreadCount) {
  const int threads_before = num_threads();
  detail::ignores_grain = true;
  for (const OpCase& op_case : op_cases())
    for (const DType dtype : {f32, bf16}) {
      const Tensors x = converted(make_inputs(op_case), Device::cpu(), dtype);
      set_num_threads(1);
      const std::vector<uint32_t> serial = bits_of(op_case, x);
      for (const int threads : {2, 5}) {
        set_num_threads(threads);
        EXPECT_EQ(bits_of(op_case, x), serial) << op_case.name << ", " << dtype << ", " << threads << " threads";
      }
    }
  detail::ignores_grain = false;
  set_num_threads(threads_before);
}

std::vector<Parameter> parameters() {
  std::vector<Parameter> all;
  for (const OpCase& c : op_cases())
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) all.push_back({&c, device});
  return all;
}

std::string parameter_name(const testing::TestParamInfo<Parameter>& info) {
  return info.param.op_case->name + '_' + name(info.param.device);
}

INSTANTIATE_TEST_SUITE_P(All, OpTable, testing::ValuesIn(parameters()), parameter_name);

TEST(OpTableCases, HaveUniqueNames) {
  std::vector<std::string> names;
  for (const OpCase& c : op_cases()) names.push_back(c.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace voxgrad::optest
