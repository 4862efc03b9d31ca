// View: the address and geometry of a tensor, passed to kernels by value.
#pragma once

#include <cstdint>

#include "dims.h"
#include "dtype.h"

namespace voxgrad {

/// Address, element type and geometry of a tensor. Strides are in elements. They may be zero (a broadcast axis) or, for
/// inputs, negative (a flipped axis). `device` is the index of the GPU, or -1 for the CPU.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int device = -1;
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  VG_HOST_DEVICE int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i)
      if (size[i] == 0) return 0;  // the other sizes may be too large to multiply
    for (int i = 0; i < rank; ++i) count *= size[i];
    return count;
  }
};

/// Returns a contiguous view of the memory at `data` with the shape and device of `like`.
inline View dense_like(const View& like, void* data, DType dtype) {
  View view = like;
  view.data = data;
  view.dtype = dtype;
  int64_t step = 1;
  for (int axis = like.rank - 1; axis >= 0; step *= like.size[axis--]) view.stride[axis] = step;
  return view;
}

}  // namespace voxgrad
