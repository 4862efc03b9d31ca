// Losses. Each checks that both sides have one shape (cross_entropy: see there).
#pragma once

#include "core/tensor.h"

namespace voxgrad {

enum class Reduction : uint8_t { mean, sum, none };

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// Quadratic below `beta`, linear above (Girshick, "Fast R-CNN", 2015).
Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean,
                      double beta = 1.0);
/// Binary cross entropy of sigmoid(input), computed without overflow. Target in [0, 1].
Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target,
                                        Reduction reduction = Reduction::mean);
/// input (N, C, ...) logits, target (N, ...) i64 class numbers in [0, C). A number outside throws Error: on the CPU
/// here; on a GPU such a voxel's loss is NaN, and the next wait for the device that happens anyway (item(), to(cpu))
/// throws.
Tensor cross_entropy(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);

}  // namespace voxgrad
