// The parameters of an epilogue: bias and ReLU.
#pragma once

#include <cmath>

#include "core/half.h"
#include "ops/detail/kernels.h"

namespace voxgrad::cuda {

/// A result is max(sum + bias, floor).
struct EpilogueParams {
  const void* bias;     ///< or null
  int64_t bias_stride;  ///< elements
  float floor;          ///< 0 with ReLU, otherwise -infinity

  EpilogueParams() = default;
  explicit EpilogueParams(const ConvEpilogue& epilogue)
      : bias(epilogue.bias ? epilogue.bias->data : nullptr),
        bias_stride(epilogue.bias ? epilogue.bias->stride[0] : 0),
        floor(epilogue.relu ? 0 : -INFINITY) {}
  /// Returns the bias of a channel, or 0 without a bias.
  template <class T, class Result = float>
  VG_HOST_DEVICE Result bias_of(int64_t channel) const {
    return bias ? static_cast<Result>(static_cast<const T*>(bias)[channel * bias_stride]) : Result(0);
  }
};

}  // namespace voxgrad::cuda
