// The description of a CPU convolution, the packing of its weights for the register tiles, and the functions for
// depthwise and pointwise convolutions.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "ops/cpu/conv_pack.h"

namespace voxgrad::cpu {

/// out(n, co) = bias(co) + sum over ci and taps of in(n, ci) * weight(co, ci). Channel numbers are relative to the
/// group.
template <class T>
struct ConvProblem {
  Volume<T> out;
  Volume<const T> in;
  Gather3 gather;
  Triple kernel{1};
  int64_t groups = 1;
  const T* weight = nullptr;
  int64_t weight_group_stride = 0;
  int64_t weight_out_stride = 0;
  int64_t weight_in_stride = 0;
  Triple weight_stride{0};
  const T* bias = nullptr;
  int64_t bias_stride = 0;
  bool relu = false;  ///< applies ReLU to the complete sums

  int64_t in_channels() const { return in.channels / groups; }
  int64_t out_channels() const { return out.channels / groups; }
};

/// The smallest unit of work: the contribution of a range of input channels to a block of output channels.
template <class T>
struct ConvUnit {
  int64_t group = 0;
  int64_t first_channel = 0;  // input channels, within the group
  int64_t channels = 0;
  ColumnBlock<T> block;      // output channels, within the group
  int64_t weights = 0;       // offset of the packed weights: [phase d, h, w][tap d, h, w][channel][column]
  int64_t weight_count = 0;  // number of packed weights

  int64_t end() const { return weights + weight_count; }
};

/// Packs weights in the order of phase (d, h, w), tap (d, h, w) of the phase, input channel and column.
template <class T>
class WeightPacking {
 public:
  explicit WeightPacking(const ConvProblem<T>& problem) : p_(problem) {
    slots_.assign(static_cast<size_t>(p_.kernel[0] * p_.kernel[1] * p_.kernel[2]), -1);
    for (const ConvPhase& pd : p_.gather[0].phases)
      for (const ConvPhase& ph : p_.gather[1].phases)
        for (const ConvPhase& pw : p_.gather[2].phases)
          for (const ConvTap& d : pd.taps)
            for (const ConvTap& h : ph.taps)
              for (const ConvTap& w : pw.taps) slots_[index(d, h, w)] = taps_++;
  }

  /// Returns the number of taps of all phases.
  int64_t taps() const { return taps_; }
  /// Returns the position of the first tap of a phase among the packed taps.
  int64_t first_slot(const std::array<const ConvPhase*, 3>& phase) const {
    return slots_[index(phase[0]->taps[0], phase[1]->taps[0], phase[2]->taps[0])];
  }

  /// Packs the weights of input channels [first, first + together) of a unit.
  void pack(const ConvUnit<T>& unit, int64_t first, int64_t together, T* weights) const {
    const int64_t columns = unit.block.family->columns, channels = std::min(together, unit.channels - first);
    if (channels <= 0) return;
    const T* source = p_.weight + unit.group * p_.weight_group_stride + unit.block.first * p_.weight_out_stride +
                      (unit.first_channel + first) * p_.weight_in_stride;
    T* to = weights + unit.weights + first * columns;
    const int64_t taps = p_.kernel[0] * p_.kernel[1] * p_.kernel[2], run = p_.weight_in_stride == taps ? channels : 1;
    if (taps_are_contiguous() && run * taps >= kColumnUnit<T>) {
      for (int64_t c = 0; c < channels; c += run)
        pack_columns(unit, source + c * p_.weight_in_stride, run * taps, run == 1 ? p_.weight_in_stride : 64,
                     to + c * columns);
      return;
    }
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (slots_[static_cast<size_t>(tap)] < 0) continue;
      const T* from = source + tap / (p_.kernel[1] * p_.kernel[2]) * p_.weight_stride[0] +
                      tap / p_.kernel[2] % p_.kernel[1] * p_.weight_stride[1] +
                      tap % p_.kernel[2] * p_.weight_stride[2];
      for (int64_t c = 0; c < channels; ++c) {
        T* const row = to + (slots_[static_cast<size_t>(tap)] * unit.channels + c) * columns;
        for (int64_t n = 0; n < unit.block.count; ++n)
          row[n] = from[n * p_.weight_out_stride + c * p_.weight_in_stride];
        std::fill(row + unit.block.count, row + columns, T(0));
      }
    }
  }

 private:
  size_t index(const ConvTap& d, const ConvTap& h, const ConvTap& w) const {
    return static_cast<size_t>((d.index * p_.kernel[1] + h.index) * p_.kernel[2] + w.index);
  }
  bool taps_are_contiguous() const {
    return p_.weight_stride[2] == 1 && p_.weight_stride[1] == p_.kernel[2] &&
           p_.weight_stride[0] == p_.kernel[1] * p_.kernel[2];
  }

  /// Packs `count` weights per column that are contiguous in memory: the kernels of one or more input channels.
  /// Transposes squares of kSquare weights and kSquare columns. The last square overlaps the previous one, and padding
  /// columns repeat the last column of the block. Also prefetches the weights `ahead` elements later.
  void pack_columns(const ConvUnit<T>& unit, const T* source, int64_t count, int64_t ahead, T* to) const {
    constexpr int kSquare = kColumnUnit<T>;
    const int64_t columns = unit.block.family->columns, taps = static_cast<int64_t>(slots_.size());
    for (int64_t i = 0; i < count; i += kSquare) {
      const int64_t at = std::min(i, count - kSquare);
      T unused[kSquare];
      T* rows[kSquare];
      int64_t channel = at / taps, tap = at % taps;
      for (T*& row : rows) {
        const int64_t slot = slots_[static_cast<size_t>(tap)];
        row = slot < 0 ? nullptr : to + (slot * unit.channels + channel) * columns;
        if (++tap == taps) tap = 0, ++channel;
      }
      for (int64_t n = 0; n < columns; n += kSquare)
        transpose<T, kSquare>(
            [&](int64_t k) {
              const T* from = source + std::min(n + k, unit.block.count - 1) * p_.weight_out_stride + at;
              __builtin_prefetch(from + ahead);
              return from;
            },
            [&](int64_t k) { return rows[k] ? rows[k] + n : unused; });
    }
  }

  const ConvProblem<T>& p_;
  int64_t taps_ = 0;
  std::vector<int64_t> slots_;  // position among the packed taps by index in the kernel; -1 if no output uses the tap
};

// ---- depthwise convolutions (conv_depthwise.cpp)

/// Returns whether the two functions below compute a convolution with the weight `w`: each group has one channel of x
/// and few channels of y.
bool is_depthwise(const View& w, const ConvGeometry& geometry);

/// Computes a forward or transposed depthwise convolution. Outputs without taps are not written. Compiled for f32 and
/// f64.
template <class T>
void convolve_depthwise(const ConvProblem<T>& problem);

/// Computes the gradient of the weight of a depthwise convolution. Compiled for f32 and f64.
template <class T>
void depthwise_weight_gradient(const View& w, const View& x, const View& y, const ConvGeometry& geometry);

// ---- pointwise convolutions (conv_pointwise.cpp): matrix products of the weight and the channels of each sample, with
// a 1 x 1 x 1 kernel and neither stride nor padding

/// Merges the spatial axes of x and y into the last axis if the convolution is pointwise and the voxels of x and y are
/// equally spaced. Returns whether the axes are merged.
bool merge_voxels(View& x, View& y, const View& w, const ConvGeometry& geometry);

/// Voxels per register tile of multiply_pointwise().
template <class T>
inline constexpr int64_t kPointwiseUnit = 2 * kVectorBytes / sizeof(T);

/// Returns whether multiply_pointwise() supports a pointwise convolution with merged axes, and is fast: contiguous
/// voxels that nearly fill one or more register tiles, and weights that fit in the workspace and are used for enough
/// voxels.
template <class T>
bool has_many_voxels(const ConvProblem<T>& p) {
  constexpr int64_t kMaxWeights = 1 << 22, kMaxWeightsPerVoxel = 2048;
  const int64_t voxels = p.out.size[2], padding = round_up(voxels, kPointwiseUnit<T>) - voxels;
  return p.out.stride[2] == 1 && p.in.stride[2] == 1 && voxels >= kPointwiseUnit<T> && padding <= voxels / 8 &&
         p.groups * p.out_channels() * p.in_channels() <=
             std::min(kMaxWeights, kMaxWeightsPerVoxel * voxels * p.out.batch);
}

/// Computes a convolution for which has_many_voxels() is true. Compiled for f32 and f64.
template <class T>
void multiply_pointwise(const ConvProblem<T>& problem);

/// Returns whether pointwise_weight_gradient() computes the weight gradient of a pointwise convolution with merged
/// axes: contiguous voxels and few channels.
bool has_few_products(const View& w, const View& x, const View& y, int64_t groups);

/// Computes the weight gradient of a pointwise convolution with merged axes. Compiled for f32 and f64.
template <class T>
void pointwise_weight_gradient(const View& w, const View& x, const View& y, int64_t groups);

}  // namespace voxgrad::cpu
