// Elementwise operators of two operands, and the choice between two: the formulas of ops/scalar_ops.h.
#include <iterator>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

template <BinaryOp op, class T>
struct Binary {
  T a, b;
  __device__ auto operator()(T x, T y) const { return apply<op>(x, y, a, b); }
};

struct Choose {
  template <class T>
  __device__ T operator()(bool condition, T x, T y) const {
    return condition ? x : y;
  }
};

template <BinaryOp op>
void binary_entry(const View& out, const View& x, const View& y, double a, double b) {
  const char* name = kBinaryNames[static_cast<size_t>(op)];
  const auto run = [&]<class T>() {
    const Binary<op, T> f{convert<T>(a), convert<T>(b)};
    using Out = decltype(apply<op>(T(), T(), T(), T()));
    map<Out, T, T>(name, f, out, x, y);
  };
  if constexpr (op >= BinaryOp::eq)
    dispatch_cuda<float, double, int64_t, int32_t, uint8_t, bool>(x.dtype, name, run);
  else if constexpr (op == BinaryOp::add || op == BinaryOp::mul)
    dispatch_cuda<float, double, BFloat16, Float16, int64_t, int32_t, bool>(x.dtype, name, run);
  else if constexpr (op <= BinaryOp::minimum)
    dispatch_cuda<float, double, int64_t, int32_t>(x.dtype, name, run);
  else
    dispatch_cuda<float, double>(x.dtype, name, run);
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
  // Only the size of an element matters.
  const auto run = [&]<class Word>() { map<Word, bool, Word, Word>("where", Choose(), out, condition, x, y); };
  switch (out.dtype) {
    case DType::u8:
    case DType::b8:
      return run.template operator()<uint8_t>();
    case DType::f32:
    case DType::i32:
      return run.template operator()<uint32_t>();
    case DType::f64:
    case DType::i64:
      return run.template operator()<uint64_t>();
    default:
      no_kernel("where", "CUDA", out.dtype);
  }
}

}  // namespace voxgrad::cuda::kernel
