// gather and scatter_add along one axis.
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

/// Calls f(element of `plain`, element of `indexed`) for each element of `index`. `plain` has elements of type P and
/// the shape of `index`. `indexed` has elements of type Q, which `index` selects along `axis`.
template <class P, class Q, class F>
void for_indexed(const char* op, const View& plain, const View& indexed, const View& index, int axis, F&& f) {
  if (plain.numel() == 0) return;
  const auto nest = make_nest(axis, plain, indexed, index);
  const Offsets across = nest.inner_stride();
  const int64_t length = plain.size[axis], size = indexed.size[axis];
  const bool axis_inner = std::abs(plain.stride[axis]) < std::abs(across[0]);
  for_each_row(
      nest,
      [&](const Offsets& offset, int64_t count) {
        P* p = plain.as<P>() + offset[0];
        Q* q = indexed.as<Q>() + offset[1];
        const int64_t* at = index.as<const int64_t>() + offset[2];
        for_lines(length, count, axis_inner, [&](int64_t k, int64_t j) {
          const int64_t i = at[k * index.stride[axis] + j * across[2]];
          check(i >= 0 && i < size, op, "index ", i, " is out of range for axis ", axis, " of size ", size);
          f(p[k * plain.stride[axis] + j * across[0]], q[i * indexed.stride[axis] + j * across[1]]);
        });
      },
      kRowPiece, length);
}

}  // namespace

void gather(const char* op, const View& out, const View& in, const View& index, int axis) {
  with_word(out.dtype, [&]<class Word>() {
    for_indexed<Word, Word>(op, out, in, index, axis, [](Word& to, const Word& from) { to = from; });
  });
}

void scatter_add(const char* op, const View& out, const View& in, const View& index, int axis) {
  dispatch(Floats(), in.dtype, "scatter_add", "CPU", [&]<class T>() {
    using C = compute_t<T>;
    std::vector<C> wide(std::is_same_v<T, C> ? 0 : static_cast<size_t>(out.numel()));
    const View sums = std::is_same_v<T, C> ? out : dense_like(out, wide.data(), dtype_of<C>);
    fill(sums, 0);
    for_indexed<T, C>(op, in, sums, index, axis, [](const T& from, C& to) { to += from; });
    if (sums.data != out.data) copy(out, sums);
  });
}

}  // namespace voxgrad::cpu
