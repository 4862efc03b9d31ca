// The super-resolution network, which predicts a correction of the trilinear interpolation.
#pragma once

#include <voxgrad.h>

#include <algorithm>

namespace superres {

/// Doubles the resolution of volumes (N, 1, D, H, W). Layers of ConvTranspose3d, GroupNorm and ReLU process the input
/// at low resolution. A final ConvTranspose3d with stride 2 computes a correction, which is added to the trilinear
/// interpolation. The correction is scaled by the standard deviation of the input, so that it is small for a scan of
/// low contrast. Finally, each block of 2 x 2 x 2 voxels is shifted so that its mean equals the input voxel, because
/// the input was made by averaging the blocks of the true volume.
class SuperResolution : public voxgrad::nn::Layer {
 public:
  struct Options {
    int64_t channels = 16;  ///< output channels of each layer at low resolution
    int64_t layers = 3;     ///< layers at low resolution
  };

  explicit SuperResolution(Options options)
      : head_{{.in_channels = options.channels, .out_channels = 1, .kernel_size = 4, .stride = 2, .padding = 1}} {
    namespace nn = voxgrad::nn;
    for (int64_t i = 0; i < options.layers; ++i) {
      const int64_t inputs = i == 0 ? 1 : options.channels;
      body_.push_back(nn::ConvTranspose3d{
          {.in_channels = inputs, .out_channels = options.channels, .kernel_size = 3, .padding = 1, .bias = false}});
      body_.push_back(nn::GroupNorm{std::min<int64_t>(4, options.channels), options.channels});
      body_.push_back(nn::ReLU{});
    }
    nn::init::zeros_(head_.weight);  // training starts from the interpolation
    nn::init::zeros_(head_.bias);
  }

  /// Returns the trilinear interpolation to twice the resolution.
  static voxgrad::Tensor trilinear(const voxgrad::Tensor& low) {
    return voxgrad::interpolate(low, {.scale_factor = 2.0, .mode = voxgrad::InterpolateMode::trilinear});
  }

  voxgrad::Tensor forward(const voxgrad::Tensor& low) const override {
    namespace vg = voxgrad;
    const vg::Tensor contrast = vg::sqrt(vg::var(low, {1, 2, 3, 4}, 0, /*keepdim=*/true) + 1e-8);
    const vg::Tensor guess = trilinear(low) + contrast * head_(body_(low));
    const vg::Tensor missing = low - vg::avg_pool3d(guess, {.kernel_size = 2});
    return guess + vg::interpolate(missing, {.scale_factor = 2.0});
  }

  VG_MODULE(body_, head_)

 private:
  voxgrad::nn::Sequential body_;
  voxgrad::nn::ConvTranspose3d head_;
};

}  // namespace superres
