// Computation of bf16 and f16 in float32.
#include "ops/detail/halves.h"

#include "ops/detail/kernels.h"
#include "ops/detail/volume.h"

namespace voxgrad {
namespace {

Tensor empty_float32(const View& like) {
  return empty(Shape(std::span(like.size, static_cast<size_t>(like.rank))), {DType::f32, device_of(like)});
}

}  // namespace

Tensor widened(const Tensor& x) { return is_half(x.dtype()) ? x.to(f32) : x; }

void through_float32(
    const View& out, const View& a, const View& b, const View* bias,
    const std::function<void(const View& out, const View& a, const View& b, const View* bias)>& kernel) {
  const Kernels& k = kernels(device_of(out));
  const auto widened = [&](const View& view) {
    const Tensor wide = empty_float32(view);
    k.copy(wide.view_out(), view);
    return wide;
  };
  const Tensor result = empty_float32(out), wide_a = widened(a), wide_b = widened(b);
  const Tensor wide_bias = bias ? widened(*bias) : Tensor();
  kernel(result.view_out(), wide_a.view_in(), wide_b.view_in(), OptionalView(wide_bias));
  k.copy(out, result.view_in());
}

}  // namespace voxgrad
