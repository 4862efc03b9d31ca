// Normalization layers. The parameter weight starts at 1, and the parameter bias at 0. Constructors throw Error if a
// size is not positive, if eps is negative or not finite, or if momentum lies outside [0, 1]. forward() throws the
// errors of the functions in ops/norm.h.
#pragma once

#include <optional>

#include "../ops/fused.h"
#include "../ops/norm.h"
#include "module.h"

namespace voxgrad::nn {

/// Base class of the norms that have one weight and one bias per channel. The input and the result have the shape
/// (N, C, ...). If `affine` is true, the parameters are weight (C) and bias (C).
class ChannelNorm : public Layer {
 public:
  Tensor forward(const Tensor& x) const override;
  std::string extra_repr() const override {
    return concat(channels_, ", eps=", eps_, weight.defined() ? "" : ", affine=false");
  }
  /// Returns whether forward() takes inputs with these numbers of channels and axes.
  bool accepts(int64_t channels, int64_t axes) const {
    return channels == channels_ && axes >= form_.min_axes && axes <= form_.max_axes;
  }
  /// Returns the arguments of the normalization, without the input, for norm_activation() in ops/fused.h. Call
  /// count_batch() after each use.
  virtual NormArguments arguments() const = 0;
  /// Counts a batch in norms that keep running statistics. forward() calls count_batch().
  virtual void count_batch() const {}

  Tensor weight;
  Tensor bias;
  VG_MODULE(weight, bias)

 protected:
  /// The name of a norm, and the axes that its inputs may have.
  struct Form {
    const char* name;
    const char* axes;  ///< names of the axes after N and C, for error messages
    int64_t min_axes;  ///< minimum number of axes, including N and C
    int64_t max_axes;  ///< maximum number of axes
  };
  ChannelNorm(const Form& form, int64_t channels, double eps, bool affine);

  Form form_;
  int64_t channels_;
  double eps_;
};

/// Options of GroupNorm.
struct GroupNormOptions {
  double eps = 1e-5;   ///< added to the variance
  bool affine = true;  ///< adds a trained weight and bias
};

/// Divides the channels into num_groups groups and normalizes each group of each sample; see voxgrad::group_norm. The
/// constructor throws Error if num_groups does not divide num_channels.
class GroupNorm : public ChannelNorm {
 public:
  GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& options = {})
      : ChannelNorm({"GroupNorm", "...", 2, kMaxRank}, num_channels, options.eps, options.affine),
        num_groups_(num_groups) {
    check(num_groups > 0 && num_channels % num_groups == 0, "GroupNorm", "num_groups = ", num_groups,
          " must be positive and divide num_channels = ", num_channels);
  }
  std::string extra_repr() const override { return concat(num_groups_, ", ", ChannelNorm::extra_repr()); }
  NormArguments arguments() const override { return {NormKind::group, weight, bias, eps_, num_groups_}; }

 private:
  int64_t num_groups_;
};

/// Options of InstanceNorm3d.
struct InstanceNormOptions {
  double eps = 1e-5;    ///< added to the variance
  bool affine = false;  ///< adds a trained weight and bias
};

/// Normalizes each channel of each sample (N, num_features, D, H, W) over D, H and W. Unlike PyTorch's layer, this
/// layer cannot track running statistics.
class InstanceNorm3d : public ChannelNorm {
 public:
  explicit InstanceNorm3d(int64_t num_features, const InstanceNormOptions& options = {})
      : ChannelNorm({"InstanceNorm3d", "D, H, W", 5, 5}, num_features, options.eps, options.affine) {}
  NormArguments arguments() const override { return {NormKind::instance, weight, bias, eps_}; }
};

/// Normalizes each channel over the batch and the spatial axes. The input has N spatial axes: (batch, num_features,
/// spatial...); BatchNorm1d also accepts (batch, num_features). In training, uses the statistics of the batch; in
/// evaluation, uses the running statistics, or the statistics of the batch if track_running_stats is false.
///
/// If track_running_stats is true, the buffers are running_mean (num_features), running_var (num_features) and
/// num_batches_tracked, an i64 scalar. If momentum is std::nullopt, the running statistics are the means over all
/// batches, and forward() in training waits for the GPU. In training, forward() changes the buffers, so only one thread
/// may call forward() at a time.
template <int N>
class BatchNorm : public ChannelNorm {
 public:
  struct Options {
    double eps = 1e-5;                     ///< added to the variance
    std::optional<double> momentum = 0.1;  ///< weight of the new batch in running statistics; nullopt: cumulative mean
    bool affine = true;                    ///< adds a trained weight and bias
    bool track_running_stats = true;       ///< keeps running statistics for evaluation
  };
  explicit BatchNorm(int64_t num_features, const Options& options = {});
  std::string extra_repr() const override {
    return concat(channels_, ", eps=", eps_, ", momentum=", momentum_ ? concat(*momentum_) : "none",
                  weight.defined() ? "" : ", affine=false",
                  running_mean.defined() ? "" : ", track_running_stats=false");
  }
  NormArguments arguments() const override;
  /// Increments num_batches_tracked in training.
  void count_batch() const override;
  /// Sets the ranks whose batches contribute to the statistics in training. Null selects this rank alone. `group` must
  /// outlive the layer.
  void set_process_group(distributed::Communicator* group) { process_group_ = group; }

  Buffer running_mean;
  Buffer running_var;
  Buffer num_batches_tracked;
  VG_MODULE(weight, bias, running_mean, running_var, num_batches_tracked)

 private:
  std::optional<double> momentum_;
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
  Tensor forward(const Tensor& x) const override {
    return layer_norm(x, normalized_shape_, weight, bias, options_.eps);
  }

  std::string extra_repr() const override {
    return concat(normalized_shape_, ", eps=", options_.eps,
                  options_.elementwise_affine ? "" : ", elementwise_affine=false", options_.bias ? "" : ", bias=false");
  }
  Tensor weight;
  Tensor bias;
  VG_MODULE(weight, bias)

 private:
  Shape normalized_shape_;
  LayerNormOptions options_;
};

}  // namespace voxgrad::nn
