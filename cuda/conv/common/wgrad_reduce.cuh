// The second kernel of split-K, which adds the partial weight gradients of all ranges.
#pragma once

#include <array>

#include "core/view.h"
#include "cuda/detail/divisor.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// Elements that a CTA of wgrad_reduce() adds at a time.
inline constexpr int kSumColumns = 32;
/// Slices of the ranges; one warp adds each slice.
inline constexpr int kSumSlices = 8;
/// The offset of an element that is not part of the weight gradient.
inline constexpr int64_t kNoWeight = INT64_MIN;

/// Adds the partial sums of all ranges in double, in a fixed order: first within 8 slices of the ranges, then the
/// slices. Target has the members partial, weight, elements and ranges. Target::offset(element) returns the offset of
/// an element in the weight gradient, or kNoWeight for padding. Launch: CTAs of kSumColumns * kSumSlices threads in a
/// 1-D grid-stride loop over groups of kSumColumns elements. Static shared memory: one double per thread.
template <class T, class Target>
__global__ void __launch_bounds__(kSumColumns* kSumSlices) wgrad_reduce(const __grid_constant__ Target p) {
  wait_for_previous_kernels();
  __shared__ double sums[kSumSlices][kSumColumns];
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns, slice = static_cast<int>(threadIdx.x) / kSumColumns;
  for (int64_t first = int64_t{blockIdx.x} * kSumColumns; first < p.elements;
       first += int64_t{gridDim.x} * kSumColumns) {
    const int64_t element = first + lane;
    const int64_t begin = p.ranges * slice / kSumSlices, end = p.ranges * (slice + 1) / kSumSlices;
    double sum = 0;
    if (element < p.elements) {
#pragma unroll 8
      for (int64_t r = begin; r < end; ++r) sum += static_cast<double>(p.partial[r * p.elements + element]);
    }
    __syncthreads();
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || element >= p.elements) continue;
    const int64_t offset = p.offset(element);
    if (offset == kNoWeight) continue;
    for (int i = 1; i < kSumSlices; ++i) sum += sums[i][lane];
    static_cast<T*>(p.weight)[offset] = T(static_cast<float>(sum));
  }
}

/// A target for weights with any strides. Omits axes with a single element, so that fewer divisions are necessary.
struct StridedWeights {
  const float* partial;
  void* weight;
  int64_t elements;
  int64_t ranges;
  int axes = 0;
  int size[5] = {};        ///< axes in the order of the partial sums, innermost first
  int64_t stride[5] = {};  ///< elements

  /// `order` lists the axes of `w` in the order of the partial sums, innermost first.
  StridedWeights(const View& w, const float* sums, int64_t num_ranges, const std::array<int, 5>& order)
      : partial(sums), weight(w.data), elements(w.numel()), ranges(num_ranges) {
    for (const int axis : order) {
      if (w.size[axis] == 1) continue;
      size[axes] = static_cast<int>(w.size[axis]);
      stride[axes++] = w.stride[axis];
    }
  }
  __device__ int64_t offset(int64_t element) const {
    int64_t offset = 0;
#pragma unroll 1
    for (int a = 0; a < axes; ++a) offset += take_digit(element, size[a]) * stride[a];
    return offset;
  }
};

template <class T, class Target>
void reduce_ranges(const Target& target, cudaStream_t stream) {
  launch_kernel("conv weight gradient: sum", wgrad_reduce<T, Target>, grid_size(target.elements, kSumColumns),
                kSumColumns * kSumSlices, 0, stream, target);
}

}  // namespace voxgrad::cuda
