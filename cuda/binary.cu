// where(), and the elementwise operators of two operands, with the formulas of ops/detail/scalar_ops.h.
#include <iterator>

#include "cuda/detail/kernels.h"
#include "cuda/gelu.cuh"
#include "cuda/map.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Applies `op` to two elements, in compute_t<T>. For halves (bf16, f16), the gradient of GELU uses the faster formula
/// of cuda/gelu.cuh.
template <BinaryOp op, class T>
struct Binary {
  using C = compute_t<T>;
  C a;
  C b;
  __device__ auto operator()(C x, C y) const {
    if constexpr (op == BinaryOp::gelu_grad && sizeof(T) == 2) {
      const Normal normal(y);
      return x * (normal.distribution + y * static_cast<float>(kInvSqrtTwoPi) * normal.exponential);
    }
    return apply<op>(x, y, a, b);
  }
};

/// The elementwise function that where() computes.
struct Choose {
  template <class T>
  __device__ T operator()(bool condition, T x, T y) const {
    return condition ? x : y;
  }
};

template <BinaryOp op>
void binary_entry(const View& out, const View& x, const View& y, double a, double b) {
  dispatch_cuda(typename Operator<op>::DTypes(), x.dtype, name(op), [&]<class T>() {
    using C = compute_t<T>;
    map<result_t<op, T>, T, T>(name(op), Binary<op, T>{convert<C>(a), convert<C>(b)}, out, x, y);
  });
}

}  // namespace

void binary(BinaryOp op, const View& out, const View& x, const View& y, double a, double b) {
  static constexpr auto entries = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{binary_entry<static_cast<BinaryOp>(i)>...};
  }
  (std::make_index_sequence<std::size(kBinaryNames)>());
  entries[static_cast<size_t>(op)](out, x, y, a, b);
}

void where(const View& out, const View& condition, const View& x, const View& y) {
  // The kernel only moves elements, so one kernel per element size is enough.
  dispatch_word(item_size(out.dtype),
                [&]<class Word>() { map<Word, bool, Word, Word>("where", Choose(), out, condition, x, y); });
}

}  // namespace voxgrad::cuda::kernel
