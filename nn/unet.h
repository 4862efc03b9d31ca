// The U-Nets of nnU-Net v2, and the rule by which it chooses their stages.
//
// Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation", Nature
// Methods 2021; the residual encoder: Isensee et al., "nnU-Net revisited", MICCAI 2024. Names of parameters are those
// of PlainConvUNet and ResidualEncoderUNet in the package dynamic-network-architectures (docs/nnunet-weights.md).
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "conv_layers.h"

namespace voxgrad::nn {

/// One resolution of a U-Net.
struct UNetStage {
  int64_t features = 32;      ///< channels
  Triple kernel_size = 3;     ///< odd
  Triple stride = 1;          ///< of the stage's first convolution, and of the transposed one that leads back
  int64_t convs = 2;          ///< on the way down; of a residual encoder: blocks of two
  int64_t decoder_convs = 2;  ///< on the way up; the last stage has none
};

struct UNetOptions {
  int64_t in_channels = 1, num_classes = 2;
  std::vector<UNetStage> stages{};  ///< from full resolution down, at least two; the first has stride 1
  bool residual = false;            ///< the residual encoder
  bool recompute = false;           ///< keeps only what the stages give: the backward pass computes each again
};

/// nnU-Net's plain convolutional U-Net, or the one with a residual encoder. Convolutions have a bias and are followed
/// by InstanceNorm3d (affine) and LeakyReLU(0.01), as one operation; strided ones lead down, ConvTranspose3d with
/// kernel size = stride leads up. A residual block's second convolution has no activation before the sum; its skip has
/// an AvgPool3d where it is strided and a 1^3 convolution without bias, with a norm, where the channels change. Every
/// stage of the decoder has a head, a 1^3 convolution.
///
/// Weights start from N(0, 2 / (1.0001 fan_in)), biases at zero (He et al. 2015), a residual block's last norm with
/// weight zero. Throws Error for options that no input fits.
class UNet : public Layer {
 public:
  using Stage = UNetStage;
  using Options = UNetOptions;
  explicit UNet(const Options& given);

  /// (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W). D, H and W must be multiples of total_stride().
  Tensor forward(const Tensor& x) const override { return decode(x, false)[0]; }
  /// The logits of all heads, largest first: forward()'s, those of the second stage's resolution, and so on. For
  /// deep_supervision_loss.
  Tensors levels(const Tensor& x) const { return decode(x, true); }

  /// The product of all strides.
  Triple total_stride() const;
  const Options& options() const { return options_; }
  std::string extra_repr() const override;
  Members members() override;

 private:
  /// What a level of the decoder does: `up` of what lies below, then `convs` of it beside the skip.
  struct Level {
    std::shared_ptr<ConvTranspose3d> up;
    std::shared_ptr<Layer> convs;
    std::shared_ptr<Conv3d> head;
  };
  void make_layers();
  void initialize();
  Tensors decode(const Tensor& x, bool all) const;
  Tensors encode(const Tensor& x) const;
  Tensor run(std::function<Tensor(const Tensors&)> stage, const Tensors& inputs) const;

  Options options_;
  std::shared_ptr<Layer> stem_;  // of a residual encoder
  std::vector<std::shared_ptr<Layer>> encoder_;
  std::vector<Level> decoder_;  // from the lowest resolution up
};

}  // namespace voxgrad::nn
