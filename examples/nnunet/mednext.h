// MedNeXt (Roy et al., "MedNeXt: transformer-driven scaling of ConvNets for medical image segmentation", MICCAI 2023).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <voxgrad.h>

namespace nnunet {

/// Options of MedNeXt. The lists have an item for each of the nine parts of the network: four levels of the encoder,
/// the lowest level, and four levels of the decoder.
struct MedNeXtOptions {
  int64_t in_channels = 1;
  int64_t num_classes = 2;
  int64_t channels = 32;           ///< channels at full resolution; each lower level has twice as many channels
  int64_t kernel_size = 3;         ///< kernel size of the depthwise convolutions: 3 or 5
  std::vector<int64_t> blocks;     ///< blocks of each part
  std::vector<int64_t> expansion;  ///< for each part: hidden channels of a block, divided by the block's input channels
  bool recompute = false;          ///< keeps only the results of blocks; the backward pass recomputes each block
};

/// Returns the options of MedNeXt-B or, with `large`, of MedNeXt-L (Table 1 of the paper).
MedNeXtOptions mednext_preset(bool large);

/// A U-Net of ConvNeXt blocks. A block is a depthwise convolution, GroupNorm with one group per channel, a 1x1x1
/// convolution to more channels, GELU, and a 1x1x1 convolution to the output channels, with a skip connection around
/// all of these layers. Blocks with stride 2 change the resolution. The decoder adds the features of the encoder to its
/// own features. Transposed convolutions have output padding 1, whereas the authors' code pads their result with zeros
/// at the front of each axis.
class MedNeXt : public voxgrad::nn::Layer {
 public:
  /// Throws Error unless `blocks` and `expansion` each have nine numbers from 1 to 1024, the kernel size is 3 or 5,
  /// `channels` is 1 to 1024, and `in_channels` and `num_classes` are positive.
  explicit MedNeXt(const MedNeXtOptions& options);

  /// Maps (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W). D, H and W must be multiples of 16.
  voxgrad::Tensor forward(const voxgrad::Tensor& x) const override { return levels(x)[0]; }
  /// Returns the logits of all five levels for deep supervision, highest resolution first.
  voxgrad::Tensors levels(const voxgrad::Tensor& x) const;
  voxgrad::nn::Members members() override;

 private:
  using Layers = std::vector<std::shared_ptr<voxgrad::nn::Layer>>;
  /// Computes a layer. If MedNeXtOptions::recompute is true, the backward pass recomputes the layer.
  voxgrad::Tensor run(const std::shared_ptr<voxgrad::nn::Layer>& layer, const voxgrad::Tensor& x) const;

  bool recompute_;
  std::shared_ptr<voxgrad::nn::Layer> stem_;
  Layers blocks_;  // one item for each of the nine parts
  Layers down_;    // highest resolution first
  Layers heads_;   // highest resolution first
  Layers up_;      // lowest resolution first
};

/// Returns `state` with the kernels of depthwise convolutions resized to the kernel sizes of `network` by trilinear
/// interpolation ("UpKern" in the paper). The result can initialize a network with kernel size 5 from a trained network
/// with kernel size 3.
voxgrad::TensorMap upkern(const voxgrad::TensorMap& state, voxgrad::nn::Module& network);

}  // namespace nnunet
