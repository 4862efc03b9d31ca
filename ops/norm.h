// Normalization over groups of channels, over the batch or over the last axes.
//
// x is (N, C, spatial...) unless noted. The statistics use the biased variance. weight and bias may be undefined; they
// must have the dtype of x, but may also be f32 if x is bf16 or f16. All functions throw Error if eps is negative or
// not finite.
#pragma once

#include <optional>

#include "../core/tensor.h"

namespace voxgrad {

namespace distributed {
class Communicator;
}

/// Normalizes each group of C / num_groups channels of each sample, then multiplies by weight (C) and adds bias (C)
/// (Wu and He, "Group Normalization", ECCV 2018). Throws Error if num_groups does not divide C or, as PyTorch does, if
/// x has one sample with one element per group.
Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// Normalizes each channel of each sample; weight and bias are (C). Throws Error, as PyTorch does, if a channel has
/// only one voxel.
Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// Normalizes each channel over all samples and voxels (Ioffe and Szegedy, "Batch normalization", ICML 2015). weight
/// and bias are (C). With `training`, the function uses the statistics of the batch and updates running_mean and
/// running_var (C) in place, if defined: running = (1 - momentum) * running + momentum * batch, with the unbiased
/// variance. Throws Error, as PyTorch does, if a channel has only one element. Without `training`, the function uses
/// running_mean and running_var, which must be defined. The dtypes of running_mean and running_var follow the rule for
/// weight and bias.
Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var, const Tensor& weight = {},
                  const Tensor& bias = {}, bool training = false, double momentum = 0.1, double eps = 1e-5);
/// Normalizes over the last axes of x, whose sizes must be `normalized_shape`. weight and bias have that shape. The
/// result is contiguous.
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// Returns x / sqrt(mean(x^2) + eps) * weight, where the mean is over the last axes of x, whose sizes must be
/// `normalized_shape` (Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019). weight has that shape
/// or is undefined. The default of eps is the machine epsilon of the dtype of x. bf16 and f16 are computed in float32
/// and rounded once.
Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {},
                std::optional<double> eps = std::nullopt);

// ---- a normalization as an argument of other functions (ops/fused.h)

/// The normalizations that other operations can apply to their results (ops/fused.h).
enum class NormKind : uint8_t { none, group, instance, batch };

/// A normalization and all of its arguments except the input.
struct NormArguments {
  NormKind kind = NormKind::none;
  Tensor weight{};
  Tensor bias{};
  double eps = 1e-5;
  int64_t num_groups = 1;  ///< number of groups of NormKind::group
  Tensor running_mean{};   ///< used by NormKind::batch, as are the members below
  Tensor running_var{};
  bool training = true;
  double momentum = 0.1;
  /// The ranks whose batches contribute to the statistics of NormKind::batch in training. Null means only this rank.
  distributed::Communicator* ranks = nullptr;
};

}  // namespace voxgrad
