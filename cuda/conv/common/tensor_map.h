// TMA tensor maps for tma_load() (common/tma.cuh), and copies that TMA can read.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <optional>

#include "core/view.h"
#include "cuda/conv/plan/common.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// A channels-last tensor for a TMA tensor map. Axes are listed from the innermost, which is contiguous. In shared
/// memory, a box consists of rows along the innermost axis. If `row_bytes` is not 0, the rows are operands of tensor
/// cores: they are swizzled over `row_bytes`, and TMA rounds float32 to TF32.
struct SwizzledTensor {
  void* data;
  DType dtype;
  int64_t size[5];
  int64_t stride[5];  ///< elements
  int box[5];         ///< elements of a box along each axis
  int step[5];        ///< elements from one element of the box to the next
  int row_bytes;      ///< 0, 32, 64 or 128
  int rank;
};

/// A view that TMA can read: the given view, or a channels-last copy whose voxels begin at multiples of 16 bytes.
class TmaTensor {
 public:
  TmaTensor(const View& view, const Launch& launch);
  const View& view() const { return view_; }

 private:
  std::optional<Workspace> copy_;
  View view_;
};

/// Returns a copy of a float32 view in the layout of lay_out(), split into the operands of tf32x3: x = high + low,
/// where high and low are TF32. The outermost axis is twice as long: first the high parts, then the low parts. The high
/// part of a value that is not finite is 0, because products with high and low parts would otherwise add infinities of
/// both signs.
View split_copy(const View& view, const std::array<int, 5>& axes, std::optional<Workspace>& memory,
                const Launch& launch);

/// Returns the TMA tensor map of a tensor. Throws Error if cuTensorMapEncodeTiled rejects the tensor.
CUtensorMap describe(const SwizzledTensor& tensor, const char* op);

/// Returns the TMA tensor map of a view for which is_tma_tensor() is true. Boxes have `channels` channels and box[]
/// voxels (sample, depth, height, width), which are in_step[] voxels apart along depth, height and width. If
/// `swizzled`, boxes are operands of tensor cores, whose rows are the channels of a voxel.
CUtensorMap describe_voxels(const View& view, int channels, const int (&box)[4], const int (&in_step)[3],
                            const char* op, bool swizzled = true);

}  // namespace voxgrad::cuda
