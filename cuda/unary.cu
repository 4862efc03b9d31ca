// Elementwise operators of one operand, with the formulas of ops/detail/scalar_ops.h.
#include <iterator>

#include "cuda/detail/kernels.h"
#include "cuda/gelu.cuh"
#include "cuda/map.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Applies `op` to an element, in compute_t<T>. For halves (bf16, f16), GELU uses the faster formula of cuda/gelu.cuh.
template <UnaryOp op, class T>
struct Unary {
  using C = compute_t<T>;
  C a;
  C b;
  __device__ auto operator()(C x) const {
    if constexpr (op == UnaryOp::gelu && sizeof(T) == 2) return x * Normal(x).distribution;
    return apply<op>(x, a, b);
  }
};

template <UnaryOp op>
void unary_entry(const View& out, const View& in, double a, double b) {
  dispatch_cuda(typename Operator<op>::DTypes(), in.dtype, name(op), [&]<class T>() {
    using C = compute_t<T>;
    map<result_t<op, T>, T>(name(op), Unary<op, T>{convert<C>(a), convert<C>(b)}, out, in);
  });
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
