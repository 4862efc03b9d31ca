// Matrix products and attention.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// PyTorch's matmul: vectors, matrices, and batches that broadcast. Throws if the inner sizes differ.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x (..., in) times the transpose of weight (out, in), plus bias (out) if defined.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

/// softmax(scale * query key^T + mask) value: query (..., L, E), key (..., S, E), value (..., S, V), result (..., L,
/// V); axes in front broadcast. scale is 1 / sqrt(E) by default. attn_mask broadcasts to the scores (..., L, S) and is
/// bool, where false excludes a key, or floating, added to the scores. is_causal excludes the keys after position i for
/// query i. dropout_p is the probability of dropping an attention weight. The result is zero for a query without keys.
/// Throws Error for attn_mask together with is_causal.
///
/// Composed of matmul and softmax: unlike PyTorch's fused kernels it stores the scores, L * S numbers for each matrix
/// (Vaswani et al., "Attention is all you need", NeurIPS 2017).
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& attn_mask = {}, double dropout_p = 0, bool is_causal = false,
                                    std::optional<double> scale = std::nullopt);

}  // namespace voxgrad
