// Access to the channels of (N, C, D, H, W) views.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/view.h"

namespace voxgrad::cpu {

/// Returns a pointer to the first element of channel number i, which is channel i % C of sample i / C.
template <class T>
T* channel_data(const View& view, int64_t i) {
  return view.as<T>() + i / view.size[1] * view.stride[0] + i % view.size[1] * view.stride[1];
}

/// Converts `values`, which are in row-major order, to T and stores them in channel number i.
template <class T, class Value>
void store_channel(const View& view, int64_t i, const std::vector<Value>& values) {
  T* out = channel_data<T>(view, i);
  auto value = values.begin();
  for (int64_t d = 0; d < view.size[2]; ++d)
    for (int64_t h = 0; h < view.size[3]; ++h)
      for (int64_t w = 0; w < view.size[4]; ++w)
        out[d * view.stride[2] + h * view.stride[3] + w * view.stride[4]] = convert<T>(*value++);
}

}  // namespace voxgrad::cpu
