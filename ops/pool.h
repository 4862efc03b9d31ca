// Pooling of signals, images and volumes.
//
// x is (N, C, D, H, W), or (C, D, H, W) without a batch; for the 2-D forms without D, for the 1-D forms without D and
// H. The result has the same axes. All functions throw Error for an empty axis other than the batch, for options that
// fit no input, and for a result without voxels.
#pragma once

#include <optional>

#include "../core/tensor.h"
#include "interpolate.h"

namespace voxgrad {

/// In front of the axes and behind them. One number, or one for each axis, is for both: 1, {1, 1, 0}, or
/// {Triple(0), Triple(1)} where they differ.
template <int N>
struct Padding {
  constexpr Padding(int64_t all) : begin(all), end(all) {}
  constexpr Padding(int all) : begin(all), end(all) {}
  constexpr Padding(const Extent<N>& both) : begin(both), end(both) {}
  constexpr Padding(const Extent<N>& in_front, const Extent<N>& behind) : begin(in_front), end(behind) {}
  template <class... Ints>
  requires(N > 1 && sizeof...(Ints) == N && (std::is_integral_v<Ints> && ...)) constexpr Padding(Ints... both)
      : begin(both...), end(both...) {}
  friend std::ostream& operator<<(std::ostream& out, const Padding& p) {
    return p.begin == p.end ? out << p.begin : out << p.begin << " and " << p.end;
  }

  Extent<N> begin, end;
};

template <int N>
struct MaxPoolOptions {
  Extent<N> kernel_size{1};
  std::optional<Extent<N>> stride{};  ///< kernel_size if not given
  Padding<N> padding{0};              ///< at most half of kernel_size
  Extent<N> dilation{1};
  bool ceil_mode = false;

  static constexpr const char* kLayer = "MaxPool";
  /// Throws Error, with `op` in front, for what fits no input. The functions below do this first.
  void validate(const char* op) const;
};
template <int N>
struct AvgPoolOptions {
  Extent<N> kernel_size{1};
  std::optional<Extent<N>> stride{};
  Padding<N> padding{0};
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<int64_t> divisor_override{};

  static constexpr const char* kLayer = "AvgPool";
  void validate(const char* op) const;
};

/// D' = (D + padding in front and behind - dilation (kernel_size - 1) - 1) / stride + 1, rounded down, or up in
/// ceil_mode. avg_pool3d: the same.
Tensor max_pool3d(const Tensor& x, const MaxPoolOptions<3>& options);
Tensor max_pool2d(const Tensor& x, const MaxPoolOptions<2>& options);
Tensor max_pool1d(const Tensor& x, const MaxPoolOptions<1>& options);
struct MaxPoolResult {
  Tensor output;
  Tensor indices;  ///< i64, positions in D * H * W
};
MaxPoolResult max_pool3d_with_indices(const Tensor& x, const MaxPoolOptions<3>& options);
MaxPoolResult max_pool2d_with_indices(const Tensor& x, const MaxPoolOptions<2>& options);
MaxPoolResult max_pool1d_with_indices(const Tensor& x, const MaxPoolOptions<1>& options);
Tensor avg_pool3d(const Tensor& x, const AvgPoolOptions<3>& options);
Tensor avg_pool2d(const Tensor& x, const AvgPoolOptions<2>& options);
Tensor avg_pool1d(const Tensor& x, const AvgPoolOptions<1>& options);

/// To any size: along an axis output o is the mean, or the maximum, of the inputs floor(o * D / D') up to
/// ceil((o + 1) * D / D').
Tensor adaptive_avg_pool3d(const Tensor& x, const Extent<3>& output_size);
Tensor adaptive_avg_pool2d(const Tensor& x, const Extent<2>& output_size);
Tensor adaptive_avg_pool1d(const Tensor& x, const Extent<1>& output_size);
Tensor adaptive_max_pool3d(const Tensor& x, const Extent<3>& output_size);
Tensor adaptive_max_pool2d(const Tensor& x, const Extent<2>& output_size);
Tensor adaptive_max_pool1d(const Tensor& x, const Extent<1>& output_size);

}  // namespace voxgrad
