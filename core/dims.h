// Sizes and strides: small vectors of int64_t that never allocate.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <ranges>
#include <span>

#include "error.h"

namespace voxgrad {

/// The maximum number of axes of a tensor.
inline constexpr int kMaxRank = 8;

/// Up to kMaxRank int64_t values: the sizes of a tensor, or its strides in elements.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  /// Copies a std::vector, std::array, std::span or any other range of integers.
  template <std::ranges::input_range Range>
  requires(std::integral<std::ranges::range_value_t<Range>> && !std::same_as<Range, Dims>) Dims(const Range& values) {
    for (const auto value : values) push_back(static_cast<int64_t>(value));
  }
  /// Returns `rank` copies of `value`.
  static Dims filled(int64_t rank, int64_t value) {
    check(rank >= 0 && rank <= kMaxRank, "Dims", "a tensor has 0 to ", kMaxRank, " axes, got ", rank);
    Dims dims;
    while (dims.rank_ < rank) dims.values_[dims.rank_++] = value;
    return dims;
  }

  int64_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  int64_t& operator[](int64_t axis) { return values_[static_cast<size_t>(axis)]; }
  int64_t operator[](int64_t axis) const { return values_[static_cast<size_t>(axis)]; }
  const int64_t* data() const { return values_.data(); }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + rank_; }
  int64_t* begin() { return values_.data(); }
  int64_t* end() { return values_.data() + rank_; }
  int64_t back() const { return values_[static_cast<size_t>(rank_ - 1)]; }

  void push_back(int64_t value) {
    check(rank_ < kMaxRank, "Dims", "a tensor has at most ", kMaxRank, " axes");
    values_[static_cast<size_t>(rank_++)] = value;
  }
  void insert(int64_t axis, int64_t value) {
    push_back(value);
    for (int64_t i = rank_ - 1; i > axis; --i) (*this)[i] = (*this)[i - 1];
    (*this)[axis] = value;
  }
  void erase(int64_t axis) {
    for (int64_t i = axis; i + 1 < rank_; ++i) (*this)[i] = (*this)[i + 1];
    --rank_;
  }

  friend bool operator==(const Dims& a, const Dims& b) { return std::ranges::equal(a, b); }
  /// Prints, for example, "[2, 32, 8]".
  friend std::ostream& operator<<(std::ostream& out, const Dims& dims) {
    out << '[';
    for (int64_t i = 0; i < dims.rank_; ++i) out << (i ? ", " : "") << dims[i];
    return out << ']';
  }

 private:
  std::array<int64_t, kMaxRank> values_{};
  int64_t rank_ = 0;
};

/// Inserts `axis` into `order` so that `order` stays sorted by key. `axis` comes after axes with an equal key. Replaces
/// std::sort, because GCC 14 warns of out-of-bounds accesses when std::sort is used on such a short array.
template <class Key>
void insert_sorted(Dims& order, int64_t axis, const Key& key) {
  int64_t place = order.size();
  while (place > 0 && key(axis) < key(order[place - 1])) --place;
  order.insert(place, axis);
}

/// The sizes of the axes of a tensor, outermost axis first. A tensor without axes has the shape {} and one element.
using Shape = Dims;
/// The distance in elements between neighbors along each axis.
using Strides = Dims;

/// One axis or a list of axes. Negative numbers count from the end.
class Axes : public Dims {
 public:
  using Dims::Dims;
  Axes(const Dims& axes) : Dims(axes) {}
  Axes(int64_t axis) { push_back(axis); }
  Axes(int axis) : Axes(int64_t{axis}) {}
};

/// Returns the product of the sizes (1 for a scalar). Throws if a size is negative or the product overflows.
int64_t numel(const Shape& shape, const char* op = "numel");

/// Returns the stride of the next outer axis of a dense tensor: step * size, where `step` and `size` are the stride and
/// the size of the current axis. A size of 0 counts as 1. The product can overflow only if the tensor is empty; the
/// strides of empty tensors are never used.
int64_t next_stride(int64_t step, int64_t size);

/// Returns the row-major strides of a dense tensor.
Strides contiguous_strides(const Shape& shape);

/// Returns the strides of a dense tensor whose axis 1 varies fastest: (N, C, D, H, W) stored as (N, D, H, W, C). The
/// shape must have at least three axes.
Strides channels_last_strides(const Shape& shape);

/// Returns true if two elements have the same address. May also return true if all elements have different
/// addresses. Returns false for dense tensors and their views, except for views made by expand() or as_strided().
bool may_overlap(const Shape& shape, const Strides& strides);

/// Returns `axis`, or axis + rank if `axis` is negative. Throws if `axis` lies outside [-rank, rank), or
/// outside [-1, 1) if `rank` is 0.
int64_t normalize_axis(int64_t axis, int64_t rank, const char* op);

/// Returns the shape to which both shapes broadcast by PyTorch's rule. Throws if they do not broadcast.
Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op);

/// N sizes, one for each spatial axis. A single integer sets all N sizes.
template <int N>
struct Extent {
  std::array<int64_t, N> values{};

  constexpr Extent(int64_t value) { values.fill(value); }
  constexpr Extent(int value) : Extent(static_cast<int64_t>(value)) {}
  template <class... Ints>
  requires(N > 1 && sizeof...(Ints) == N) constexpr Extent(Ints... sizes) : values{static_cast<int64_t>(sizes)...} {}

  constexpr int64_t operator[](int axis) const { return values[static_cast<size_t>(axis)]; }
  constexpr int64_t& operator[](int axis) { return values[static_cast<size_t>(axis)]; }
  friend constexpr bool operator==(const Extent&, const Extent&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Extent& e) { return out << Dims(e.values); }
};

using Triple = Extent<3>;

}  // namespace voxgrad
