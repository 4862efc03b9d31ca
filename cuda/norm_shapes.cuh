// Types through which kernels address the tensors, groups and parameters of normalizations, and the forms of the kernel
// that computes normalizations (norm.cuh).
#pragma once

#include <bit>

#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/nest.cuh"
#include "cuda/vector.cuh"
#include "ops/detail/norm_activations.h"

namespace voxgrad::cuda {
namespace {  // several .cu files instantiate kernels with the same names

/// The inputs and the output (N, C, L) of a formula.
template <int kInputs>
struct Volumes {
  View in[kInputs];
  View out;
};

/// An optional vector (C) of dtype T or compute_t<T>.
struct PerChannel {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = f32;

  explicit PerChannel(const View* v)
      : data(v ? v->data : nullptr), stride(v ? v->stride[0] : 0), dtype(v ? v->dtype : f32) {}
  /// Returns the element of a channel, or `otherwise` if there is no vector.
  template <class T>
  __device__ double at(int64_t channel, double otherwise) const {
    if (!data) return otherwise;
    if (dtype == dtype_of<T>) return convert<double>(static_cast<const T*>(data)[channel * stride]);
    return static_cast<double>(static_cast<const compute_t<T>*>(data)[channel * stride]);
  }
  /// Rounds and stores the element of a channel; does nothing if there is no vector.
  template <class T>
  __device__ void set(int64_t channel, double value) const {
    if (!data) return;
    if (dtype == dtype_of<T>)
      static_cast<T*>(data)[channel * stride] = convert<T>(value);
    else
      static_cast<compute_t<T>*>(data)[channel * stride] = static_cast<compute_t<T>>(value);
  }
};

/// Returns the rounding error of a mean in compute_t<T>.
template <class T>
__device__ double rest_of(double mean) {
  return mean - static_cast<double>(static_cast<compute_t<T>>(mean));
}

/// The sizes of a normalization. A group consists of neighboring channels of one sample or, if `joined` is true, of the
/// same channels of all samples. A line is the positions of one (sample, channel); its index is n * channels + c.
struct Groups {
  int64_t samples;
  int64_t channels;
  int64_t length;          ///< positions of a line
  int64_t groups;          ///< groups into which the channels are divided
  int64_t group_channels;  ///< channels of a group
  bool joined;

  Groups(const View& x, int64_t group_count, bool over_samples = false)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        groups(group_count),
        group_channels(channels / groups),
        joined(over_samples) {}
  /// Uses the sizes of x, and derives `groups` and `joined` from the shape of the statistics.
  Groups(const View& x, const View& statistics) : Groups(x, statistics.size[1], statistics.size[0] != x.size[0]) {}
  VG_HOST_DEVICE int64_t lines() const { return samples * channels; }
  /// Returns the number of (mean, rstd) pairs.
  VG_HOST_DEVICE int64_t count() const { return joined ? groups : samples * groups; }
  VG_HOST_DEVICE int64_t group_lines() const { return joined ? samples * group_channels : group_channels; }
  /// Returns the group of a channel.
  __device__ int64_t group(int64_t channel) const { return quotient(channel, group_channels); }
  /// Returns the index in [0, count()) of the statistics of a (sample, channel).
  __device__ int64_t number(int64_t n, int64_t channel) const { return (joined ? 0 : n * groups) + group(channel); }
  /// Returns the i-th of the lines from which the statistics with index `number` are computed.
  __device__ int64_t line(int64_t number, int64_t i) const {
    const int64_t first = quotient(number, groups), sample = quotient(i, group_channels);
    return (first + sample) * channels + (number - first * groups - sample) * group_channels + i;
  }
};

/// The sums of a formula over each range of the positions of each line: sums[range][line].
struct RangeSums {
  const double2* sums;
  int64_t lines;
  int64_t ranges;
  int64_t range;   ///< positions of a range, except the last one
  int64_t length;  ///< positions of a line

  __device__ const double2& at(int64_t line, int64_t i) const { return sums[i * lines + line]; }
  /// Returns the positions of a range.
  __device__ int64_t count(int64_t i) const { return min(range, length - i * range); }
};

/// The normalization of the channels of a sample: v = before(x), u = (v - mean) * rstd * gamma + beta, y = after(u).
template <class T, class Activations>
struct Normalization {
  using Wide = compute_t<T>;

  Groups shape;
  const double2* statistics;  ///< (mean, rstd) of each group
  PerChannel gamma;
  PerChannel beta;
  Activations activations;

  /// Constants of u = (v - mean) * factor + term. The rounding error of the mean is part of the term, so that
  /// subtracting the mean costs no accuracy even if the mean is large compared with the deviations.
  struct Channel {
    Wide mean;
    Wide factor;
    Wide term;
  };
  __device__ Channel channel(int64_t n, int64_t c) const {
    const double2 group = statistics[shape.number(n, c)];
    const double factor = group.y * gamma.at<T>(c, 1);
    return {static_cast<Wide>(group.x), static_cast<Wide>(factor),
            static_cast<Wide>(beta.at<T>(c, 0) - rest_of<T>(group.x) * factor)};
  }
  /// Returns v - mean.
  __device__ Wide centered(const Channel& channel, Wide x) const { return activations.before.value(x) - channel.mean; }
  /// Returns u.
  static __device__ Wide normalized(const Channel& channel, Wide centered) {
    return centered * channel.factor + channel.term;
  }
};

/// The ways in which threads read the elements.
/// - scalar: single elements of any strides.
/// - rows: contiguous positions. A thread reads vectors along the positions of one channel.
/// - columns: channels innermost. A thread reads vectors of neighboring channels, keeps their constants and sums, and
///   steps through the positions.
enum class Form { scalar, rows, columns };

/// Returns whether the positions of every channel are contiguous in all views, and whether vectors begin at the same
/// elements of a channel in all views.
template <class T, class... Views>
bool are_rows(const Views&... views) {
  size_t misalignments = 0;
  for (const void* start : {static_cast<const void*>(views.data)...})
    misalignments |= size_t{1} << (reinterpret_cast<uintptr_t>(start) / sizeof(T) % kVectorWidth<T>);
  const auto has_rows = [](const View& v) {
    return v.stride[2] == 1 && (v.stride[1] - v.size[2]) % kVectorWidth<T> == 0 &&
           (v.stride[0] - v.size[1] * v.size[2]) % kVectorWidth<T> == 0;
  };
  return (has_rows(views) && ...) && std::has_single_bit(misalignments);
}

/// Returns the form for the views of a formula. f64 has no vector forms, because it is used mainly to check gradients.
template <class T, class... Views>
Form choose_form(const Views&... views) {
  if (sizeof(T) == 8) return Form::scalar;
  if ((has_vectors(views, 1, kVectorWidth<T>) && ...)) return Form::columns;
  return are_rows<T>(views...) ? Form::rows : Form::scalar;
}

/// Calls with_activations() of ops/detail/norm_activations.h. For the scalar form, calls f(AnyActivations) instead,
/// which supports all activations with one compiled kernel. `views` are all views that the formulas read and write.
template <class T, class F, class... Views>
void with_vector_activations(const NormActivations& activations, const F& f, const Views&... views) {
  if (choose_form<T>(views...) == Form::scalar) return f(AnyActivations(activations));
  if constexpr (sizeof(T) < 8) with_activations<T>(activations, f);
}

}  // namespace
}  // namespace voxgrad::cuda
