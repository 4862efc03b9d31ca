// Implements the wrappers WeightNorm and SpectralNorm.
#include "nn/weight_norm.h"

#include "ops/detail/halves.h"
#include "ops/elementwise.h"
#include "ops/linalg.h"
#include "ops/reduce.h"
#include "ops/shape.h"

namespace voxgrad::nn::detail {
namespace {

Tensor as_matrix(const Tensor& weight, int64_t axis) {
  Dims order{axis};
  for (int64_t i = 0; i < weight.dim(); ++i)
    if (i != axis) order.push_back(i);
  return flatten(permute(widened(weight), order), 1);
}

Tensor normalized(const Tensor& vector, double eps) { return vector / clamp(norm(vector), eps, INFINITY); }

}  // namespace

Tensor weight_norms(const Tensor& weight, std::optional<int64_t> axis) {
  if (!axis) return norm(weight).to(weight.dtype());
  Dims others;
  const int64_t kept = normalize_axis(*axis, weight.dim(), "WeightNorm");
  for (int64_t i = 0; i < weight.dim(); ++i)
    if (i != kept) others.push_back(i);
  return norm(weight, 2, others, true).to(weight.dtype());
}

Tensor scaled_direction(const Tensor& direction, const Tensor& magnitude, std::optional<int64_t> axis) {
  const Tensor wide = widened(direction);
  return (wide * (widened(magnitude) / weight_norms(wide, axis))).to(direction.dtype());
}

void power_iteration(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v, int64_t steps, double eps) {
  NoGradGuard no_grad;
  const Tensor matrix = as_matrix(weight, axis), transposed = transpose(matrix, 0, 1);
  for (int64_t i = 0; i < steps; ++i) {
    u.copy_(normalized(matmul(matrix, widened(v)), eps));
    v.copy_(normalized(matmul(transposed, widened(u)), eps));
  }
}

Tensor divided_by_singular_value(const Tensor& weight, int64_t axis, const Tensor& u, const Tensor& v) {
  // Copies u and v, because the graph saves them and a later power iteration changes them in place.
  const Tensor left = widened(u.clone()), right = widened(v.clone());
  return (widened(weight) / sum(left * matmul(as_matrix(weight, axis), right))).to(weight.dtype());
}

}  // namespace voxgrad::nn::detail
