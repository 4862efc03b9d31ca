// Elementwise operators: the formulas of ops/scalar_ops.h over rows, and Eigen's vectorised exp and tanh
// where a call of the C library for each element would cost more than the memory.
#include <array>

#include "ops/cpu/eigen.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"
#include "ops/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

template <class T>
Block<T> sigmoid_block(const Block<T>& x) {
  return T(1) / (T(1) + exp_block<T>(-x));
}

/// The block form of an operator, or nothing where the scalar formula serves.
template <auto op, class T>
auto block_form([[maybe_unused]] T a, [[maybe_unused]] T b) {
  using B = Block<T>;
  if constexpr (std::is_same_v<decltype(op), UnaryOp>) {
    if constexpr (op == UnaryOp::exp)
      return exp_block<T>;
    else if constexpr (op == UnaryOp::tanh && sizeof(T) == 4)
      return [](const B& x) -> B { return x.tanh(); };
    else if constexpr (op == UnaryOp::sigmoid)
      return sigmoid_block<T>;
    else if constexpr (op == UnaryOp::silu)
      return [](const B& x) -> B { return x * sigmoid_block<T>(x); };
  } else {
    if constexpr (op == BinaryOp::silu_grad)
      return [](const B& g, const B& x) -> B {
        const B s = sigmoid_block<T>(x);
        return g * s * (T(1) + x * (T(1) - s));
      };
    else if constexpr (op == BinaryOp::softplus_grad)
      return [a, b](const B& g, const B& x) -> B { return (a * x > b).select(g, g * sigmoid_block<T>(a * x)); };
  }
}

template <auto op, class T>
inline constexpr bool has_block_form = [] {
  if constexpr (std::is_floating_point_v<T>)
    return !std::is_void_v<decltype(block_form<op, T>(T(), T()))>;
  else
    return false;
}();

/// y = op(x...; a, b) over a row.
template <auto op, class Out, class C, class... In>
void compute_row(C a, C b, int64_t count, Out* y, const In*... x) {
  if constexpr (has_block_form<op, C>) {
    map_blocks<C>(block_form<op, C>(a, b), count, y, x...);
  } else {
    VG_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) y[i] = apply<op>(x[i]..., a, b);
  }
}

/// The row in float32, if it is one of halves.
template <class T>
const compute_t<T>* widened(const T* x, int64_t count, compute_t<T>* buffer) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    return x;
  } else {
    VG_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) buffer[i] = static_cast<float>(x[i]);
    return buffer;
  }
}

/// out = op(in...; a, b) with operands of type In.
template <auto op, class T, class... In, class... Views>
void elementwise(double a, double b, const View& out, const Views&... in) {
  using C = compute_t<T>;
  using Out = result_t<op, T>;
  using Computed = std::conditional_t<std::is_same_v<Out, bool>, bool, C>;
  map_rows<Out, In...>(
      [a = convert<C>(a), b = convert<C>(b)](Out* y, const In*... x, int64_t count) {
        if constexpr (std::is_same_v<T, C>) {
          compute_row<op, Out>(a, b, count, y, x...);
        } else {
          std::tuple<RowBuffer<compute_t<In>>...> wide;
          RowBuffer<Computed> result;
          std::apply(
              [&](auto&... buffer) {
                compute_row<op, Computed>(a, b, count, result.data(), widened(x, count, buffer.data())...);
              },
              wide);
          VG_INDEPENDENT
          for (int64_t i = 0; i < count; ++i) y[i] = convert<Out>(result.data()[i]);
        }
      },
      out, in...);
}

template <UnaryOp op>
void unary_entry(const View& out, const View& in, double a, double b) {
  dispatch(typename Operator<op>::DTypes(), in.dtype, name(op), "CPU",
           [&]<class T>() { elementwise<op, T, T>(a, b, out, in); });
}

template <BinaryOp op>
void binary_entry(const View& out, const View& x, const View& y, double a, double b) {
  dispatch(typename Operator<op>::DTypes(), x.dtype, name(op), "CPU",
           [&]<class T>() { elementwise<op, T, T, T>(a, b, out, x, y); });
}

}  // namespace

void unary(UnaryOp op, const View& out, const View& in, double a, double b) {
  static constexpr auto table = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{unary_entry<static_cast<UnaryOp>(i)>...};
  }
  (std::make_index_sequence<std::size(kUnaryNames)>());
  table[static_cast<size_t>(op)](out, in, a, b);
}

void binary(BinaryOp op, const View& out, const View& x, const View& y, double a, double b) {
  static constexpr auto table = []<size_t... i>(std::index_sequence<i...>) {
    return std::array{binary_entry<static_cast<BinaryOp>(i)>...};
  }
  (std::make_index_sequence<std::size(kBinaryNames)>());
  table[static_cast<size_t>(op)](out, x, y, a, b);
}

void where(const View& out, const View& condition, const View& x, const View& y) {
  dispatch(Anything(), out.dtype, "where", "CPU",
           [&]<class T>() { map<T, bool, T, T>([](bool c, T a, T b) { return c ? a : b; }, out, condition, x, y); });
}

}  // namespace voxgrad::cpu
