// Elementwise operators. Rows are computed with the formulas of ops/detail/scalar_ops.h, or with Eigen's vectorized exp
// and tanh where the functions of the C library would take longer than the memory accesses.
#include <array>

#include "ops/cpu/eigen.h"
#include "ops/cpu/loops.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cpu {
namespace {

template <class T>
Block<T> sigmoid_block(const Block<T>& x) {
  return T(1) / (T(1) + exp_block<T>(-x));
}

/// Returns a function that computes the operator for blocks. The return type is void if the operator has no function
/// for blocks and uses the formula for single elements.
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

/// The constants a and b of an operator.
using Constants = std::array<double, 2>;

/// Computes y = op(x...; a, b) for a row of elements of type T.
template <auto op, class T>
void compute_row(const void* state, int64_t count, void* out, const void* const* in) {
  const Constants& constants = *static_cast<const Constants*>(state);
  auto* const y = static_cast<result_t<op, T>*>(out);
  const auto compute = [&, a = convert<T>(constants[0]), b = convert<T>(constants[1])](const auto*... x) {
    if constexpr (has_block_form<op, T>) {
      map_blocks<T>(block_form<op, T>(a, b), count, y, x...);
    } else {
      VG_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) y[i] = apply<op>(x[i]..., a, b);
    }
  };
  const auto* const x = static_cast<const T*>(in[0]);
  if constexpr (std::is_same_v<decltype(op), UnaryOp>)
    compute(x);
  else
    compute(x, static_cast<const T*>(in[1]));
}

template <auto op>
RowFunction row_function(DType dtype) {
  RowFunction result = nullptr;
  dispatch(typename Operator<op>::DTypes(), dtype, name(op), "CPU",
           [&]<class T>() { result = compute_row<op, compute_t<T>>; });
  return result;
}

/// Returns the row function of operator `op` for operands of `dtype`. `count` is the number of operators of type Op.
template <class Op, size_t count>
RowFunction find_row_function(Op op, DType dtype) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    static constexpr std::array table{row_function<static_cast<Op>(i)>...};
    return table[static_cast<size_t>(op)](dtype);
  }
  (std::make_index_sequence<count>());
}

}  // namespace

void unary(UnaryOp op, const View& out, const View& in, double a, double b) {
  const Constants constants{a, b};
  map_rows(find_row_function<UnaryOp, std::size(kUnaryNames)>(op, in.dtype), &constants, {out, in});
}

void binary(BinaryOp op, const View& out, const View& x, const View& y, double a, double b) {
  const Constants constants{a, b};
  map_rows(find_row_function<BinaryOp, std::size(kBinaryNames)>(op, x.dtype), &constants, {out, x, y});
}

void where(const View& out, const View& condition, const View& x, const View& y) {
  with_word(out.dtype, [&]<class Word>() {
    const RowFunction row = [](const void*, int64_t count, void* result, const void* const* in) {
      const auto* const c = static_cast<const bool*>(in[0]);
      const Word *const a = static_cast<const Word*>(in[1]), *const b = static_cast<const Word*>(in[2]);
      VG_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) static_cast<Word*>(result)[i] = c[i] ? a[i] : b[i];
    };
    map_rows(row, nullptr, {{out, out.dtype}, condition, {x, out.dtype}, {y, out.dtype}});
  });
}

}  // namespace voxgrad::cpu
