// Tests the accuracy of the CUDA convolutions and of matmul against the CPU in f64. Convolutions run in every mode, a
// dtype with a float32 precision. Their error limits apply to each result as a whole and to each of its parts: the
// border, each tap, and each phase, the positions with equal remainders modulo the stride. Tests with positive operands
// detect systematic rounding errors.
#include <cmath>
#include <map>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/linalg.h"
#include "ops/reduce.h"
#include "tests/cuda/conv_problem.h"

namespace voxgrad::cudatest {
namespace {

using CudaAccuracy = OnGpu;

/// The error limits of a mode.
struct Accuracy {
  Mode mode;
  /// Maximum of norm(error) / norm(result) for the output and the data gradient.
  double forward;
  /// Maximum of norm(error) / norm(result) for the weight gradient.
  double weight;
  /// Maximum of |sum of errors / sum of results| for the output and the data gradient of positive operands.
  double bias;
  /// The same limit for the weight gradient. It is larger because the sums are longer and the accumulators truncate.
  double weight_bias;
  /// Maximum of the error of an element / sum of the magnitudes of its products.
  double element;
};

// TF32 rounds both operands of a product with relative error 2^-11. bf16 and f16 round only the result, with relative
// errors 2^-8 and 2^-11. The columns are the members of Accuracy.
const Accuracy kAccuracies[] = {{kModes[0], 1e-6, 3e-6, 6e-7, 1e-6, 3e-6},
                                {kModes[1], 4e-4, 4e-4, 3e-5, 1.5e-4, 1.1e-3},
                                {kModes[2], 2.2e-3, 2.2e-3, 1e-4, 2e-4, 4.1e-3},
                                {kModes[3], 2.8e-4, 2.8e-4, 3e-5, 1.5e-4, 6e-4}};

/// Returns the output, the data gradient and the weight gradient for the operands x, w and dy.
Tensors convolve(const Problem& p, const Tensors& operands, Device device, DType dtype) {
  Tensors t;
  for (const Tensor& operand : operands) t.push_back(operand.to(device, dtype));
  const Tensors results{empty_like(t[2]), empty_like(t[0]), empty_like(t[1])};
  const Kernels& k = kernels(device);
  k.conv_forward(results[0].view_out(), t[0].view_in(), t[1].view_in(), nullptr, p.geometry);
  k.conv_backward_data(results[1].view_out(), t[2].view_in(), t[1].view_in(), nullptr, p.geometry);
  k.conv_backward_weight(results[2].view_out(), t[0].view_in(), t[2].view_in(), p.geometry);
  return results;
}

/// Returns the number of the part of the result that contains the element. The parts of a weight are its taps. The
/// parts of a volume are the phases of the stride, each divided into border and interior.
int64_t part_of(const Problem& p, const Shape& shape, bool weight, int64_t element) {
  int64_t part = 0, step = 1;
  bool border = false;
  for (int a = 2; a >= 0; --a) {
    const int64_t size = shape[a + 2], index = element % size;
    element /= size;
    border = border || index == 0 || index == size - 1;
    part += step * (weight ? index : index % p.geometry.stride[a]);
    step *= weight ? size : p.geometry.stride[a];
  }
  return weight ? part : 2 * part + border;
}

/// Sums over the elements of a result or of a part of it.
struct Sums {
  double error2 = 0;  // squared errors
  double exact2 = 0;  // squared exact values
  double error = 0;   // signed errors
  double exact = 0;   // exact values
};

void expect_accurate(const Problem& p, const Tensors& operands, const Accuracy& accuracy, bool positive) {
  Tensors magnitudes;
  for (const Tensor& operand : operands) magnitudes.push_back(abs(operand));
  const Tensors exact = convolve(p, operands, Device::cpu(), f64),
                magnitude_sums = convolve(p, magnitudes, Device::cpu(), f64);
  const ScopedSetting setting(accuracy.mode.precision);
  const Tensors got = convolve(p, operands, Device::cuda(), accuracy.mode.dtype);
  for (size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i == 0 ? "forward" : i == 1 ? "data gradient" : "weight gradient");
    const auto values = got[i].to_vector<double>();
    const auto correct = exact[i].to_vector<double>(), sum = magnitude_sums[i].to_vector<double>();
    std::map<int64_t, Sums> parts;
    Sums all;
    double worst = 0;
    for (size_t k = 0; k < correct.size(); ++k) {
      const double error = values[k] - correct[k];
      ASSERT_FALSE(std::isnan(values[k])) << k;
      worst = std::max(worst, std::abs(error) / (sum[k] + 1e-300));
      for (Sums* s : {&all, &parts[part_of(p, got[i].shape(), i == 2, static_cast<int64_t>(k))]}) {
        s->error2 += error * error;
        s->exact2 += correct[k] * correct[k];
        s->error += error;
        s->exact += correct[k];
      }
    }
    EXPECT_LE(worst, accuracy.element) << "largest error of an element";
    const double limit = i == 2 ? accuracy.weight : accuracy.forward;
    EXPECT_LE(std::sqrt(all.error2 / all.exact2), limit) << "error of the whole result";
    for (const auto& [number, s] : parts)
      EXPECT_LE(std::sqrt(s.error2 / s.exact2), limit) << "error of part " << number;
    if (positive) {
      EXPECT_LE(std::abs(all.error / all.exact), i == 2 ? accuracy.weight_bias : accuracy.bias) << "systematic error";
    }
  }
}

TEST_F(CudaAccuracy, ConvolutionsMeetTheLimitsOfTheirMode) {
  NoGradGuard no_grad;
  manual_seed(kFirstSeed);
  const Problem problems[] = {
      {1, 64, 48, {20, 20, 20}, {3, 3, 3}, {{1}, {1}, {1}, 1}},
      {2, 64, 40, {21, 20, 19}, {3, 3, 3}, {{2}, {1}, {1}, 1}},
      {1, 16, 24, {24, 24, 24}, {3, 4, 5}, {{2, 1, 3}, {1, 3, 2}, {1, 2, 1}, 2}},
  };
  for (const Problem& p : problems)
    for (const bool positive : {false, true})
      for (const Accuracy& accuracy : kAccuracies) {
        SCOPED_TRACE(concat(accuracy.mode, positive ? ", positive: " : ": ", p));
        const auto values = [&](const Shape& shape) {
          const Tensor t = rand(shape);
          return (positive ? t : affine(t, 2, -1)).to(accuracy.mode.dtype).to(f32);  // exact in the dtype of the mode
        };
        expect_accurate(p, {values(p.x_shape()), values(p.w_shape()), values(p.y_shape())}, accuracy, positive);
      }
}

TEST_F(CudaAccuracy, MatmulMeetsTheLimitsOfItsPrecision) {
  const Tensor a = randn({300, 500}), b = randn({500, 400}), exact = matmul(a.to(f64), b.to(f64));
  const auto error = [&](Float32Precision precision) {
    const ScopedSetting setting(precision);
    const Tensor got = matmul(a.to(Device::cuda()), b.to(Device::cuda())).to(Device::cpu(), f64);
    return std::sqrt(sum(pow(got - exact, 2)).item() / sum(pow(exact, 2)).item());
  };
  EXPECT_LE(error(Float32Precision::highest), 1e-6);
  EXPECT_LE(error(Float32Precision::high), 4e-4);
  EXPECT_GE(error(Float32Precision::high), 2e-5) << "precision high does not use TF32";
}

}  // namespace
}  // namespace voxgrad::cudatest
