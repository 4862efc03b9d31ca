// Matrix products.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// PyTorch's matmul: vectors, matrices, and batches that broadcast. Throws if the inner sizes differ.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x (..., in) times the transpose of weight (out, in), plus bias (out) if defined.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

}  // namespace voxgrad
