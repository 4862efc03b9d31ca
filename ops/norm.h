// Normalisation over groups of channels. x is (N, C, spatial...); statistics use the biased variance.
#pragma once

#include "core/tensor.h"

namespace voxgrad {

/// Wu and He, "Group Normalization", ECCV 2018. weight and bias (C), both or either may be undefined.
/// Throws if num_groups does not divide C.
Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// Every channel of every sample by itself.
Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// Over the last axes, whose sizes are `normalized_shape`; weight and bias have that shape.
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);

}  // namespace voxgrad
