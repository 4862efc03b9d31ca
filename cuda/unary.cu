// Elementwise operators of one operand: the formulas of ops/scalar_ops.h.
#include <iterator>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

template <UnaryOp op, class T>
struct Unary {
  T a, b;
  __device__ auto operator()(T x) const { return apply<op>(x, a, b); }
};

template <UnaryOp op>
void unary_entry(const View& out, const View& in, double a, double b) {
  const char* name = kUnaryNames[static_cast<size_t>(op)];
  const auto run = [&]<class T>() {
    const Unary<op, T> f{convert<T>(a), convert<T>(b)};
    using Out = decltype(apply<op>(T(), T(), T()));
    map<Out, T>(name, f, out, in);
  };
  if constexpr (op == UnaryOp::affine || op == UnaryOp::neg || op == UnaryOp::abs || op == UnaryOp::clamp)
    dispatch_cuda<float, double, int64_t, int32_t>(in.dtype, name, run);
  else if constexpr (op == UnaryOp::logical_not)
    dispatch_cuda<bool>(in.dtype, name, run);
  else if constexpr (op == UnaryOp::isfinite)
    dispatch_cuda<float, double, BFloat16, Float16>(in.dtype, name, run);
  else
    dispatch_cuda<float, double>(in.dtype, name, run);
}

}  // namespace

void unary(UnaryOp op, const View& out, const View& in, double a, double b) {
  static constexpr auto entries = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{unary_entry<static_cast<UnaryOp>(i)>...};
  }
  (std::make_index_sequence<std::size(kUnaryNames)>());
  entries[static_cast<size_t>(op)](out, in, a, b);
}

}  // namespace voxgrad::cuda::kernel
