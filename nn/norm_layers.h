// Normalization layers. weight starts at one, bias at zero. Constructors throw Error if a size is not positive, eps
// negative or not finite, or momentum outside [0, 1]; forward() throws what the function of ops/norm.h does.
#pragma once

#include <optional>

#include "../ops/fused.h"
#include "../ops/norm.h"
#include "module.h"

namespace voxgrad::nn {

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;
};

/// See voxgrad::group_norm. weight and bias (num_channels) if affine. Throws if num_groups does not divide
/// num_channels.
class GroupNorm : public Layer {
 public:
  GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& given = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_groups_, ", ", num_channels_, ", eps=", options_.eps, options_.affine ? "" : ", affine=false");
  }
  int64_t num_groups() const { return num_groups_; }
  int64_t num_channels() const { return num_channels_; }
  const GroupNormOptions& options() const { return options_; }
  /// What forward() gives group_norm beside the input.
  NormArguments arguments() const { return {NormKind::group, weight, bias, options_.eps, num_groups_}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  int64_t num_groups_, num_channels_;
  GroupNormOptions options_;
};

struct InstanceNormOptions {
  double eps = 1e-5;
  bool affine = false;
};

/// Every channel of every sample normalised by itself, over (N, num_features, D, H, W). Keeps no running
/// statistics.
class InstanceNorm3d : public Layer {
 public:
  explicit InstanceNorm3d(int64_t num_features, const InstanceNormOptions& given = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_features_, ", eps=", options_.eps, options_.affine ? "" : ", affine=false");
  }
  int64_t num_features() const { return num_features_; }
  const InstanceNormOptions& options() const { return options_; }
  NormArguments arguments() const { return {NormKind::instance, weight, bias, options_.eps}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  int64_t num_features_;
  InstanceNormOptions options_;
};

/// Every channel normalised over the batch: (N, num_features, spatial...) with N spatial axes, of BatchNorm1d also
/// (N, num_features). In training with the batch's statistics, in eval() with the running ones, unless these are not
/// tracked. weight and bias if affine; buffers running_mean and running_var, and num_batches_tracked (i64), from which
/// their mean over all batches follows where there is no momentum (that waits for a GPU). In training, forward()
/// changes the buffers: one thread at a time.
template <int N>
class BatchNorm : public Layer {
 public:
  struct Options {
    double eps = 1e-5;
    std::optional<double> momentum = 0.1;
    bool affine = true;
    bool track_running_stats = true;
  };
  explicit BatchNorm(int64_t num_features, const Options& given = {});
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(num_features_, ", eps=", options_.eps, ", momentum=",  //
                  options_.momentum ? concat(*options_.momentum) : "none", options_.affine ? "" : ", affine=false",
                  options_.track_running_stats ? "" : ", track_running_stats=false");
  }
  int64_t num_features() const { return num_features_; }
  const Options& options() const { return options_; }
  NormArguments arguments() const;
  /// After a use of arguments().
  void count_batch() const;
  /// In training the batch is that of all ranks of `group`, each of which has equally many samples; null: of this one.
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

/// Converts the BatchNorm layers of `module` to PyTorch's SyncBatchNorm: in training they normalize by the statistics
/// of the elements of all ranks of `group`. Ranks may hold different numbers of samples and voxels, also none. `group`
/// must outlive the layers. Second derivatives are not supported.
void convert_sync_batchnorm(Module& module, distributed::Communicator& group);

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;
  bool bias = true;
};

struct RMSNormOptions {
  std::optional<double> eps{};  ///< by default, the machine epsilon of the input's dtype
  bool elementwise_affine = true;
};

/// See voxgrad::rms_norm: over the last axes, of sizes `normalized_shape`; weight has that shape.
class RMSNorm : public Layer {
 public:
  explicit RMSNorm(const Shape& normalized_shape, const RMSNormOptions& given = {});
  /// Over the last axis.
  explicit RMSNorm(int64_t size, const RMSNormOptions& given = {}) : RMSNorm(Shape{size}, given) {}
  Tensor forward(const Tensor& x) const override { return rms_norm(x, normalized_shape_, weight, options_.eps); }

  std::string extra_repr() const override { return concat(normalized_shape_); }
  Tensor weight;
  VG_MODULE(weight)

 private:
  Shape normalized_shape_;
  RMSNormOptions options_;
};

/// Over the last axes, of sizes `normalized_shape`; weight and bias have that shape.
class LayerNorm : public Layer {
 public:
  explicit LayerNorm(const Shape& normalized_shape, const LayerNormOptions& given = {});
  /// Over the last axis.
  explicit LayerNorm(int64_t size, const LayerNormOptions& given = {}) : LayerNorm(Shape{size}, given) {}
  Tensor forward(const Tensor& x) const override;

  std::string extra_repr() const override {
    return concat(normalized_shape_, ", eps=", options_.eps,
                  options_.elementwise_affine ? "" : ", elementwise_affine=false", options_.bias ? "" : ", bias=false");
  }
  const Shape& normalized_shape() const { return normalized_shape_; }
  const LayerNormOptions& options() const { return options_; }
  NormArguments arguments() const { return {NormKind::layer, weight, bias, options_.eps, 1, normalized_shape_}; }
  Tensor weight, bias;
  VG_MODULE(weight, bias)

 private:
  Shape normalized_shape_;
  LayerNormOptions options_;
};

}  // namespace voxgrad::nn
