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

/// out = op(in...; a, b) with operands of type T.
template <auto op, class T, class... Views>
void elementwise(double a, double b, const View& out, const Views&... in) {
  const T ta = convert<T>(a), tb = convert<T>(b);
  const auto typed = [&]<class... In>() {
    if constexpr (has_block_form<op, T>) {
      map_rows<T, In...>([block = block_form<op, T>(ta, tb)](T* y, const In*... x,
                                                             int64_t count) { map_blocks<T>(block, count, y, x...); },
                         out, in...);
    } else {
      using Out = decltype(apply<op>(In()..., ta, tb));
      map<Out, In...>([ta, tb](In... x) { return apply<op>(x..., ta, tb); }, out, in...);
    }
  };
  if constexpr (sizeof...(Views) == 1)
    typed.template operator()<T>();
  else
    typed.template operator()<T, T>();
}

template <UnaryOp op>
void unary_entry(const View& out, const View& in, double a, double b) {
  const auto run = [&]<class T>() { elementwise<op, T>(a, b, out, in); };
  const char* name = kUnaryNames[static_cast<size_t>(op)];
  if constexpr (op == UnaryOp::affine || op == UnaryOp::neg || op == UnaryOp::abs || op == UnaryOp::clamp)
    dispatch<float, double, int64_t, int32_t>(in.dtype, name, "CPU", run);
  else if constexpr (op == UnaryOp::logical_not)
    dispatch<bool>(in.dtype, name, "CPU", run);
  else if constexpr (op == UnaryOp::isfinite)
    dispatch<float, double, BFloat16, Float16>(in.dtype, name, "CPU", run);
  else
    dispatch<float, double>(in.dtype, name, "CPU", run);
}

template <BinaryOp op>
void binary_entry(const View& out, const View& x, const View& y, double a, double b) {
  const auto run = [&]<class T>() { elementwise<op, T>(a, b, out, x, y); };
  const char* name = kBinaryNames[static_cast<size_t>(op)];
  if constexpr (op >= BinaryOp::eq)
    dispatch<float, double, int64_t, int32_t, uint8_t, bool>(x.dtype, name, "CPU", run);
  else if constexpr (op == BinaryOp::add || op == BinaryOp::mul)
    dispatch<float, double, BFloat16, Float16, int64_t, int32_t, bool>(x.dtype, name, "CPU", run);
  else if constexpr (op <= BinaryOp::minimum)
    dispatch<float, double, int64_t, int32_t>(x.dtype, name, "CPU", run);
  else
    dispatch<float, double>(x.dtype, name, "CPU", run);
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
  dispatch<float, double, int64_t, int32_t, uint8_t, bool>(out.dtype, "where", "CPU", [&]<class T>() {
    map<T, bool, T, T>([](bool c, T a, T b) { return c ? a : b; }, out, condition, x, y);
  });
}

}  // namespace voxgrad::cpu
