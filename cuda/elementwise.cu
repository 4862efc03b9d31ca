// Elementwise operators, with the formulas of ops/detail/scalar_ops.h, and where().
#include <iterator>

#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/normal.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Applies `op` to one element of each operand, in compute_t<T>. For halves (bf16, f16), GELU and its gradient use
/// Normal.
template <auto op, class T>
struct Elementwise {
  using C = compute_t<T>;
  C a;
  C b;
  __device__ auto operator()(C x) const {
    if constexpr (op == UnaryOp::gelu && sizeof(T) == 2) return x * Normal(x).distribution;
    return apply<op>(x, a, b);
  }
  __device__ auto operator()(C x, C y) const {
    if constexpr (op == BinaryOp::gelu_grad && sizeof(T) == 2) {
      const Normal normal(y);
      return x * (normal.distribution + y * static_cast<float>(kInvSqrtTwoPi) * normal.exponential);
    }
    return apply<op>(x, y, a, b);
  }
};

/// An alias of T that ignores its second parameter. Repeated<T, Views>... is one T for each type of the parameter pack
/// Views.
template <class T, class>
using Repeated = T;

/// Computes out = op(x, y...) elementwise. `a` and `b` are the parameters of the operator.
template <auto op, class... Views>
void run(double a, double b, const View& out, const View& x, const Views&... y) {
  dispatch_cuda(typename Operator<op>::DTypes(), x.dtype, name(op), [&]<class T>() {
    using C = compute_t<T>;
    const Elementwise<op, T> f{convert<C>(a), convert<C>(b)};
    map<result_t<op, T>, T, Repeated<T, Views>...>(name(op), f, out, x, y...);
  });
}

/// Return the operator whose kernel computes `op`. x > y is computed as y < x, and x >= y as y <= x.
constexpr UnaryOp compiled(UnaryOp op) { return op; }
constexpr BinaryOp compiled(BinaryOp op) {
  return op == BinaryOp::gt ? BinaryOp::lt : op == BinaryOp::ge ? BinaryOp::le : op;
}

/// Calls run() for the kernel of operator `op`. `count` is the number of operators of type Op.
template <size_t count, class Op, class... Views>
void run_any(Op op, double a, double b, const View& out, const View& x, const Views&... y) {
  static constexpr auto entries = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{run<compiled(static_cast<Op>(i)), Views...>...};
  }
  (std::make_index_sequence<count>());
  entries[static_cast<size_t>(op)](a, b, out, x, y...);
}

/// The elementwise function that where() computes.
struct Choose {
  template <class T>
  __device__ T operator()(bool condition, T x, T y) const {
    return condition ? x : y;
  }
};

}  // namespace

void unary(UnaryOp op, const View& out, const View& in, double a, double b) {
  run_any<std::size(kUnaryNames)>(op, a, b, out, in);
}

void binary(BinaryOp op, const View& out, const View& x, const View& y, double a, double b) {
  const bool swapped = compiled(op) != op;
  run_any<std::size(kBinaryNames)>(op, a, b, out, swapped ? y : x, swapped ? x : y);
}

void where(const View& out, const View& condition, const View& x, const View& y) {
  // The kernel only moves elements, so one kernel per element size is enough.
  dispatch_word(item_size(out.dtype),
                [&]<class Word>() { map<Word, bool, Word, Word>("where", Choose(), out, condition, x, y); });
}

}  // namespace voxgrad::cuda::kernel
