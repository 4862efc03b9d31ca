// Matrix products and attention. All products are computed as batches of matrices (batch, rows, columns).
#include "ops/linalg.h"

#include <cmath>
#include <limits>

#include "ops/detail/common.h"

namespace voxgrad {
namespace {

/// Multiplies matrix i of `a` (batch, m, k) by matrix i of `b` (batch, k, n) for each batch index i.
Tensor batched_product(const Tensor& a, const Tensor& b) {
  const Tensor c = empty({a.size(0), a.size(1), b.size(2)}, a.options());
  kernels(a.device()).matmul(c.view_out(), a.view_in(), b.view_in());
  const bool da = a.requires_grad(), db = b.requires_grad();
  return record("matmul", c, {a, b},
                [da, db, a = db ? Saved(a) : Saved(), b = da ? Saved(b) : Saved()](const Tensor& grad) {
                  return Tensors{da ? batched_product(grad, transpose(b(), 1, 2)) : Tensor(),
                                 db ? batched_product(transpose(a(), 1, 2), grad) : Tensor()};
                });
}

/// Returns the sizes of the batch axes: all axes except the last two.
Shape batch_of(const Tensor& t) { return Shape(std::span(t.shape().data(), static_cast<size_t>(t.dim() - 2))); }

/// Returns the shape (batch..., rows, columns).
Shape with_matrix(Shape batch, int64_t rows, int64_t columns) {
  batch.push_back(rows);
  batch.push_back(columns);
  return batch;
}

/// Broadcasts t to the batch axes `batch` and merges these axes: the result is (numel(batch), rows, columns). A single
/// matrix is expanded without a copy.
Tensor flattened(const Tensor& t, const Shape& batch) {
  const int64_t count = numel(batch), rows = t.size(-2), columns = t.size(-1);
  if (numel(batch_of(t)) == 1) return expand(reshape(t, {1, rows, columns}), {count, rows, columns});
  return reshape(expand(t, with_matrix(batch, rows, columns)), {count, rows, columns});
}

Tensor matrix_product(const Tensor& a, const Tensor& b) {
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  if (b.dim() == 2) {  // multiply all rows of the batch with one matrix product
    const int64_t rows = numel(batch_of(a)) * m;
    const Tensor c = batched_product(reshape(a, {1, rows, k}), unsqueeze(b, 0));
    return reshape(c, with_matrix(batch_of(a), m, n));
  }
  const Shape batch = broadcast_shapes(batch_of(a), batch_of(b), "matmul");
  return reshape(batched_product(flattened(a, batch), flattened(b, batch)), with_matrix(batch, m, n));
}

constexpr const char* kAttention = "scaled_dot_product_attention";

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, bool is_causal) {
  check_defined(kAttention, "query", query, "key", key, "value", value);
  check_floating(kAttention, query);
  const Operand q{"query", query}, k{"key", key}, v{"value", value};
  check_same_kind(kAttention, {q, k, v});
  const bool fits = query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2 && query.size(-1) == key.size(-1) &&
                    key.size(-2) == value.size(-2);
  check(fits, kAttention, "takes query (..., L, E), key (..., S, E) and value (..., S, V), got ", q, ", ", k, " and ",
        v);
  if (!mask.defined()) return;
  check(!is_causal, kAttention, "takes attn_mask or is_causal, got both");
  check((mask.dtype() == b8 || is_floating(mask.dtype())) && mask.device() == query.device(), kAttention,
        "attn_mask must be bool or floating and on the query's device, got ", describe(mask));
}

/// Returns the softmax of the masked scores. If the mask excludes all scores of a row, the row of the result is zero.
Tensor masked_softmax(const Tensor& scores, const Tensor& mask) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const bool broadcasts = broadcast_shapes(mask.shape(), scores.shape(), kAttention) == scores.shape();
  check(broadcasts, kAttention, "attn_mask ", mask.shape(), " does not broadcast to the scores ", scores.shape());
  if (scores.numel() == 0) return scores;
  const Tensor masked = mask.dtype() == b8 ? where(mask, scores, -kInfinity) : scores + mask.to(scores.dtype());
  const Tensor is_empty = eq(amax(masked.detach(), -1, true), -kInfinity);
  return where(is_empty, 0.0, softmax(where(is_empty, 0.0, masked), -1));
}

}  // namespace

Tensor matmul(const Tensor& first, const Tensor& second) {
  const Tensor a = autocasted("matmul", first), b = autocasted("matmul", second);
  check_defined("matmul", "the first operand", a, "the second operand", b);
  check_floating("matmul", a);
  check_same_kind("matmul", {{"the first operand", a}, {"the second operand", b}});
  check(a.dim() > 0 && b.dim() > 0, "matmul", "needs vectors or matrices, got shapes ", a.shape(), " and ", b.shape());
  const int64_t inner = b.size(b.dim() > 1 ? -2 : 0);
  check(a.size(-1) == inner, "matmul", "inner sizes ", a.size(-1), " and ", inner, " differ (shapes ", a.shape(),
        " and ", b.shape(), ')');
  // A vector on the left is a matrix with one row, and a vector on the right is a matrix with one column. The axis of
  // size 1 is removed from the result.
  if (a.dim() == 1) return squeeze(matmul(unsqueeze(a, 0), b), b.dim() > 1 ? -2 : 0);
  if (b.dim() == 1) return squeeze(matrix_product(a, unsqueeze(b, 1)), -1);
  return matrix_product(a, b);
}

Tensor linear(const Tensor& input, const Tensor& given_weight, const Tensor& given_bias) {
  const Tensor x = autocasted("linear", input), weight = autocasted("linear", given_weight),
               bias = autocasted("linear", given_bias);
  check_defined("linear", "input", x, "weight", weight);
  check_floating("linear", x);
  check_same_kind("linear", {{"input", x}, {"weight", weight}, {"bias", bias}});
  check(weight.dim() == 2, "linear", "weight must be (out, in), got ", weight.shape());
  check(x.dim() > 0 && x.size(-1) == weight.size(1), "linear", "weight expects ", weight.size(1),
        weight.size(1) == 1 ? " input feature (input " : " input features (input ", x.shape(), ", weight ",
        weight.shape(), ')');
  check(!bias.defined() || bias.shape() == Shape{weight.size(0)}, "linear", "bias must have shape [", weight.size(0),
        "], got ", describe(bias));
  const Tensor y = matmul(x, transpose(weight, 0, 1));
  return bias.defined() ? y + bias : y;
}

Tensor scaled_dot_product_attention(const Tensor& given_query, const Tensor& given_key, const Tensor& given_value,
                                    const Tensor& attn_mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale) {
  const Tensor query = autocasted("matmul", given_query), key = autocasted("matmul", given_key),
               value = autocasted("matmul", given_value);
  check_attention(query, key, value, attn_mask, is_causal);
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  check_finite(kAttention, "scale", factor);
  const Tensor scores = matmul(query * factor, transpose(key, -2, -1));
  Tensor mask = attn_mask;
  if (is_causal) {
    const auto positions = [&](int64_t count) {
      return arange(0, static_cast<double>(count), 1, {i64, scores.device()});
    };
    mask = ge(unsqueeze(positions(query.size(-2)), 1), positions(key.size(-2)));
  }
  const Tensor weights = mask.defined() ? masked_softmax(scores, mask) : softmax(scores, -1);
  return matmul(dropout(weights, dropout_p), value);
}

}  // namespace voxgrad
