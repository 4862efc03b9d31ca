// What the operators on volumes share: sizes, results that lie in memory as their input does, and operands that may be
// missing. Private to ops/.
#pragma once

#include <optional>

#include "core/tensor.h"

namespace voxgrad {

/// D, H, W of (N, C, D, H, W).
inline Triple spatial_size(const Tensor& x) { return {x.size(2), x.size(3), x.size(4)}; }

/// A new (N, channels, size...) in the memory format of `like`, an (N, C, D, H, W).
inline Tensor empty_volume(const Tensor& like, int64_t channels, const Triple& size, DType dtype) {
  const Shape shape{like.size(0), channels, size[0], size[1], size[2]};
  const bool last = like.suggest_memory_format() == MemoryFormat::channels_last;
  return empty_strided(shape, last ? channels_last_strides(shape) : contiguous_strides(shape), {dtype, like.device()});
}

inline bool wants_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }

/// For kernels, which take a pointer that may be null.
inline std::optional<View> optional_view(const Tensor& t) {
  return t.defined() ? std::optional<View>(t.view_in()) : std::nullopt;
}
inline const View* pointer(const std::optional<View>& view) { return view ? &*view : nullptr; }

}  // namespace voxgrad
