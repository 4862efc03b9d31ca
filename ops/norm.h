// Normalisation over groups of channels, or over a batch. x is (N, C, spatial...); statistics use the biased variance.
// weight and bias have x's dtype or, where that is bf16 or f16, f32. The functions throw Error if eps is negative or
// not finite.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

namespace distributed {
class Communicator;
}

/// Wu and He, "Group Normalization", ECCV 2018. weight and bias (C), both or either may be undefined.
/// Throws if num_groups does not divide C, and, as PyTorch does, for one sample with one value in each group.
Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// Every channel of every sample by itself. Throws, as PyTorch does, if a channel has one voxel.
Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// Ioffe and Szegedy, "Batch normalization", ICML 2015: every channel over all samples and voxels. In training with the
/// batch's own statistics, towards which running_mean and running_var (C), where defined, are moved by `momentum` of
/// the way in place (the variance unbiased); throws, as PyTorch does, for one value in each channel. Otherwise with the
/// running ones, which must be given. They have the dtypes that weight and bias may have.
Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight = {},
                  const Tensor& bias = {}, bool training = false, double momentum = 0.1, double eps = 1e-5);
/// Over the last axes, whose sizes are `normalized_shape`; weight and bias have that shape. The result is contiguous.
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// x / sqrt(mean(x^2) + eps) over the last axes, whose sizes are `normalized_shape`, times weight, which has that shape
/// or is undefined. Without eps, it is the machine epsilon of x's dtype. Halves are computed in float32 and rounded
/// once (Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019).
Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {},
                std::optional<double> eps = std::nullopt);

// ---- the same as a value, for what takes any of them (ops/fused.h)

enum class NormKind : uint8_t { none, group, instance, batch, layer };

/// A normalisation with its arguments beside the input.
struct NormArguments {
  NormKind kind = NormKind::none;
  Tensor weight{}, bias{};
  double eps = 1e-5;
  int64_t num_groups = 1;                ///< of group
  Shape normalized_shape{};              ///< of layer
  Tensor running_mean{}, running_var{};  ///< of batch, as training and momentum
  bool training = true;
  double momentum = 0.1;
  /// For NormKind::batch in training: the ranks over whose elements the statistics are taken, null for this one alone.
  distributed::Communicator* ranks = nullptr;
};

}  // namespace voxgrad
