// Tensors as TMA maps (tma_load() of common/tma.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include <optional>

#include "core/view.h"
#include "cuda/conv/plan_common.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {

/// A channels-last tensor: the axes from the innermost, which is contiguous, in elements. Its boxes lie in shared
/// memory as rows of `row_bytes` (32, 64 or 128) bytes along that axis, swizzled over so many bytes; float32 is rounded
/// to TF32.
struct SwizzledTensor {
  void* data;
  DType dtype;
  int64_t size[5];
  int64_t stride[5];
  int box[5], step[5];
  int row_bytes;
  int rank;
};

/// The view, or a copy of it that is channels-last with voxels at multiples of 16 bytes.
class TmaTensor {
 public:
  TmaTensor(const View& view, const Launch& launch);
  /// Of the copy.
  static int64_t copy_bytes(const View& view);
  const View& view() const { return view_; }

 private:
  std::optional<Workspace> copy_;
  View view_;
};

/// Throws an Error of `op` if the driver has no words for it.
CUtensorMap describe(const SwizzledTensor& tensor, const char* op);

/// Of a view that TMA reads: boxes of `channels` channels by box[] voxels (sample, depth, height, width), each
/// in_step-th.
CUtensorMap describe_voxels(const View& view, int channels, const int (&box)[4], const int (&in_step)[3],
                            const char* op);

}  // namespace voxgrad::cuda
