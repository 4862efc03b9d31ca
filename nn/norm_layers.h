// Normalization layers. weight starts at 1 and bias at 0. Constructors throw Error if a size is not positive, if eps is
// negative or not finite, or if momentum lies outside [0, 1]. forward() throws the errors of the functions in
// ops/norm.h.
#pragma once

#include <optional>

#include "../ops/fused.h"
#include "../ops/norm.h"
#include "module.h"

namespace voxgrad::nn {

/// Options of GroupNorm.
struct GroupNormOptions {
  double eps = 1e-5;   ///< added to the variance
  bool affine = true;  ///< adds a trained weight and bias
};

/// Divides the channels into num_groups groups and normalizes each group of each sample. Input and result: (N,
/// num_channels, ...). See voxgrad::group_norm. Parameters if affine: weight and bias (num_channels). The constructor
/// throws Error if num_groups does not divide num_channels.
class GroupNorm : public Layer {
 public:
  GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& options = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_groups_, ", ", num_channels_, ", eps=", options_.eps, options_.affine ? "" : ", affine=false");
  }
  int64_t num_channels() const { return num_channels_; }
  /// Returns the arguments of the normalization, without the input, for norm_activation() in ops/fused.h.
  NormArguments arguments() const { return {NormKind::group, weight, bias, options_.eps, num_groups_}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  int64_t num_groups_, num_channels_;
  GroupNormOptions options_;
};

/// Options of InstanceNorm3d.
struct InstanceNormOptions {
  double eps = 1e-5;    ///< added to the variance
  bool affine = false;  ///< adds a trained weight and bias
};

/// Normalizes each channel of each sample over D, H and W. Input and result: (N, num_features, D, H, W). Parameters if
/// affine: weight and bias (num_features). Unlike PyTorch's layer, this layer cannot track running statistics.
class InstanceNorm3d : public Layer {
 public:
  explicit InstanceNorm3d(int64_t num_features, const InstanceNormOptions& options = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_features_, ", eps=", options_.eps, options_.affine ? "" : ", affine=false");
  }
  int64_t num_features() const { return num_features_; }
  /// Returns the arguments of the normalization, without the input.
  NormArguments arguments() const { return {NormKind::instance, weight, bias, options_.eps}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  int64_t num_features_;
  InstanceNormOptions options_;
};

/// Normalizes each channel over the batch and the spatial axes. The input has N spatial axes: (batch, num_features,
/// spatial...); BatchNorm1d also accepts (batch, num_features). In training, uses the statistics of the batch; in
/// evaluation, uses the running statistics, or those of the batch if track_running_stats is false.
///
/// Parameters if affine: weight and bias (num_features). Buffers if track_running_stats: running_mean and running_var
/// (num_features), and num_batches_tracked, an i64 scalar. If momentum is std::nullopt, the running statistics are the
/// means over all batches, and forward() in training waits for the GPU. In training, forward() changes the buffers, so
/// only one thread may call forward() at a time.
template <int N>
class BatchNorm : public Layer {
 public:
  struct Options {
    double eps = 1e-5;                     ///< added to the variance
    std::optional<double> momentum = 0.1;  ///< weight of the new batch in running statistics; nullopt: cumulative mean
    bool affine = true;                    ///< adds a trained weight and bias
    bool track_running_stats = true;       ///< keeps running statistics for evaluation
  };
  explicit BatchNorm(int64_t num_features, const Options& options = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_features_, ", eps=", options_.eps, ", momentum=",  //
                  options_.momentum ? concat(*options_.momentum) : "none", options_.affine ? "" : ", affine=false",
                  options_.track_running_stats ? "" : ", track_running_stats=false");
  }
  int64_t num_features() const { return num_features_; }
  /// Returns the arguments of the normalization, without the input. Call count_batch() after each use.
  NormArguments arguments() const;
  /// Increments num_batches_tracked in training. forward() calls count_batch().
  void count_batch() const;
  /// Sets the ranks whose batches contribute to the statistics in training. Null selects this rank alone. `group` must
  /// outlive the layer.
  void set_process_group(distributed::Communicator* group) { process_group_ = group; }
  Tensor weight, bias;
  Buffer running_mean, running_var, num_batches_tracked;
  VG_MODULE(weight, bias, running_mean, running_var, num_batches_tracked)

 private:
  int64_t num_features_;
  Options options_;
  distributed::Communicator* process_group_ = nullptr;
};

using BatchNorm1d = BatchNorm<1>;
using BatchNorm2d = BatchNorm<2>;
using BatchNorm3d = BatchNorm<3>;

/// Makes all BatchNorm layers of `module` compute their training statistics over all ranks of `group`, as PyTorch's
/// SyncBatchNorm does. Ranks may have different numbers of samples and voxels; a rank may also have none. `group` must
/// outlive the layers. Second derivatives are not supported.
void convert_sync_batchnorm(Module& module, distributed::Communicator& group);

/// Options of LayerNorm.
struct LayerNormOptions {
  double eps = 1e-5;               ///< added to the variance
  bool elementwise_affine = true;  ///< adds a trained weight
  bool bias = true;                ///< adds a trained bias; ignored without elementwise_affine
};

/// Options of RMSNorm.
struct RMSNormOptions {
  std::optional<double> eps{};     ///< by default, the machine epsilon of the input's dtype
  bool elementwise_affine = true;  ///< adds a trained weight
};

/// Divides by the root mean square over the last axes, whose sizes are `normalized_shape`; see voxgrad::rms_norm. The
/// parameter weight has the shape `normalized_shape`.
class RMSNorm : public Layer {
 public:
  explicit RMSNorm(const Shape& normalized_shape, const RMSNormOptions& options = {});
  /// Normalizes over the last axis.
  explicit RMSNorm(int64_t size, const RMSNormOptions& options = {}) : RMSNorm(Shape{size}, options) {}
  Tensor forward(const Tensor& x) const override { return rms_norm(x, normalized_shape_, weight, options_.eps); }

  std::string extra_repr() const override { return concat(normalized_shape_); }
  Tensor weight;
  VG_MODULE(weight)

 private:
  Shape normalized_shape_;
  RMSNormOptions options_;
};

/// Normalizes over the last axes, whose sizes are `normalized_shape`; see voxgrad::layer_norm. The parameters weight
/// and bias have the shape `normalized_shape`.
class LayerNorm : public Layer {
 public:
  explicit LayerNorm(const Shape& normalized_shape, const LayerNormOptions& options = {});
  /// Normalizes over the last axis.
  explicit LayerNorm(int64_t size, const LayerNormOptions& options = {}) : LayerNorm(Shape{size}, options) {}
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(normalized_shape_, ", eps=", options_.eps,
                  options_.elementwise_affine ? "" : ", elementwise_affine=false", options_.bias ? "" : ", bias=false");
  }
  /// Returns the arguments of the normalization, without the input.
  NormArguments arguments() const { return {NormKind::layer, weight, bias, options_.eps, 1, normalized_shape_}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  Shape normalized_shape_;
  LayerNormOptions options_;
};

}  // namespace voxgrad::nn
