// Matrix products and attention.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

/// Returns the product of two vectors, of two matrices, or of two batches of matrices (..., m, k) and (..., k, n) whose
/// batch axes broadcast. A vector `a` is a matrix with one row, and a vector `b` is a matrix with one column; the axis
/// of size 1 is removed from the result. Throws Error if the inner sizes differ.
Tensor matmul(const Tensor& a, const Tensor& b);
/// Returns x (..., in_features) times the transpose of weight (out_features, in_features), plus bias (out_features) if
/// the bias is defined.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

/// Returns softmax(scale * query * key^T + mask) * value, with matrix products (Vaswani et al., "Attention is all you
/// need", NeurIPS 2017), for `query` (..., L, E), `key` (..., S, E) and `value` (..., S, V). L is the number of
/// queries, S the number of keys, and E and V are numbers of features. The result is (..., L, V); leading axes
/// broadcast. scale is 1 / sqrt(E) by default. attn_mask broadcasts to the scores (..., L, S). A bool mask excludes the
/// keys for which the mask is false; a floating-point mask is added to the scores. is_causal excludes the keys after
/// position i for query i. dropout_p is the probability of dropping an attention weight. A query for which all keys are
/// excluded gives zeros.
///
/// Throws Error if attn_mask and is_causal are both given. The function is composed of matmul and softmax. Unlike
/// PyTorch's fused kernels, it stores the scores, which are L * S elements per matrix.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& attn_mask = {}, double dropout_p = 0, bool is_causal = false,
                                    std::optional<double> scale = std::nullopt);

}  // namespace voxgrad
