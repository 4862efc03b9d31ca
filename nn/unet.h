// The U-Nets of nnU-Net v2.
//
// Plain U-Net: Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image
// segmentation", Nature Methods 2021. Residual encoder: Isensee et al., "nnU-Net revisited", MICCAI 2024. The names of
// the parameters are those of PlainConvUNet and ResidualEncoderUNet in the package dynamic-network-architectures
// (docs/nnunet-weights.md).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conv_layers.h"

namespace voxgrad::nn {

/// Options of one resolution of a U-Net.
struct UNetStage {
  int64_t features = 32;      ///< number of channels
  Triple kernel_size = 3;     ///< sizes along D, H, W; must be odd
  Triple stride = 1;          ///< stride of the stage's first convolution; the decoder enlarges by the same factors
  int64_t convs = 2;          ///< number of convolutions in the encoder, or of residual blocks if `residual` is true
  int64_t decoder_convs = 2;  ///< number of convolutions in the decoder; ignored in the last stage
};

/// The normalization after each convolution of a U-Net.
struct UNetNorm {
  bool batch = false;  ///< BatchNorm3d instead of InstanceNorm3d
  bool affine = true;  ///< adds a trained weight and bias
  double eps = 1e-5;   ///< added to the variance
};

/// Options of UNet.
struct UNetOptions {
  int64_t in_channels = 1;
  int64_t num_classes = 2;          ///< channels of the result
  std::vector<UNetStage> stages{};  ///< at least two, from the highest resolution; the first has stride 1
  bool residual = false;            ///< uses the residual encoder
  /// Adds a bias to convolutions. The heads, which compute the logits, always have a bias.
  bool bias = true;
  std::optional<UNetNorm> norm = UNetNorm{};  ///< nullopt: no normalization
  ActivationArguments activation{ActivationKind::leaky_relu};
  bool recompute = false;  ///< saves only the results of stages; the backward pass recomputes each stage
};

/// nnU-Net's plain convolutional U-Net, or its U-Net with a residual encoder. Each convolution is followed by a
/// normalization and an activation; the three run as one operation. Strided convolutions reduce the resolution.
/// Transposed convolutions, whose kernel size equals their stride, restore the resolution. Every stage of the decoder
/// has a head, a 1x1x1 convolution to num_classes channels. In a residual block, the second convolution has no
/// activation before the sum. The skip connection contains an AvgPool3d if the block is strided, and a normalized 1x1x1
/// convolution without bias if the number of channels changes.
///
/// Weights start from the normal distribution with variance 2 / ((1 + a^2) fan_in), where `a` is the negative slope of
/// the LeakyReLU and 0 for other activations (He et al. 2015). Biases start at 0. The weight of a residual block's last
/// normalization starts at 0. The constructor throws Error for invalid options.
class UNet : public Layer {
 public:
  using Stage = UNetStage;
  using Options = UNetOptions;
  explicit UNet(const Options& options);

  /// Maps (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W). Throws Error unless D, H and W are multiples
  /// of total_stride().
  Tensor forward(const Tensor& x) const override { return decode(x, false)[0]; }
  /// Returns the logits of all heads for deep_supervision_loss, from the highest resolution: first the result of
  /// forward(), then the logits at the resolution of the second stage, and so on.
  Tensors levels(const Tensor& x) const { return decode(x, true); }

  /// Returns the product of all strides along D, H and W.
  Triple total_stride() const {
    Triple total = 1;
    for (const Stage& stage : options_.stages)
      for (int axis = 0; axis < 3; ++axis) total[axis] *= stage.stride[axis];
    return total;
  }
  const Options& options() const { return options_; }
  std::string extra_repr() const override {
    return concat(options_.in_channels, ", ", options_.num_classes, ", stages=", options_.stages.size(),
                  options_.residual ? ", residual=true" : "", options_.recompute ? ", recompute=true" : "");
  }
  Members members() override;

 private:
  /// A stage of the decoder. `up` enlarges the features of the next lower resolution. `convs` combines the enlarged
  /// features with the features of the encoder, and `head` computes the logits.
  struct Level {
    std::shared_ptr<ConvTranspose3d> up;
    std::shared_ptr<Layer> convs;
    std::shared_ptr<Conv3d> head;
  };
  void make_layers();
  void initialize();
  /// Returns the logits of all heads, or only those of the highest resolution.
  Tensors decode(const Tensor& x, bool all) const;
  /// Returns the features of all stages, from the highest resolution.
  Tensors encode(const Tensor& x) const;
  /// Computes stage(inputs). If options.recompute is true, the backward pass recomputes the stage. `stage` takes the
  /// inputs by value, so that `stage` can free the inputs early.
  Tensor run(std::function<Tensor(Tensors)> stage, Tensors inputs) const;

  Options options_;
  std::shared_ptr<Layer> stem_;  // the first convolution if the encoder is residual; otherwise null
  std::vector<std::shared_ptr<Layer>> encoder_;
  std::vector<Level> decoder_;  // from the lowest resolution
};

}  // namespace voxgrad::nn
