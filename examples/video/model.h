// The layers of a variational auto-encoder (VAE) for videos, and its decoder. The layers are causal: a frame of the
// result does not depend on later frames. In shapes, T is the number of frames.
#pragma once

#include <voxgrad.h>

namespace video {
namespace vg = voxgrad;
using vg::Tensor;

/// A 3 x 3 x 3 convolution of (N, C, T, H, W). A frame of the result depends on the same frame of x and two earlier
/// frames. With stride 2, T becomes (T + 1) / 2.
struct CausalConv : vg::nn::Layer {
  CausalConv(int64_t in_channels, int64_t out_channels, int64_t stride = 1)
      : conv(in_channels, out_channels, 3, stride, vg::Extent<3>(0, 1, 1)) {}
  vg::nn::Conv3d conv;
  VG_MODULE(conv)
  Tensor forward(const Tensor& x) const override { return conv(vg::pad(x, {0, 0, 0, 0, 2, 0})); }
};

/// A transposed convolution that doubles H and W. T becomes 2 T - 1, because the first frame yields only one frame.
struct Upsample : vg::nn::Layer {
  Upsample(int64_t in_channels, int64_t out_channels) : conv(in_channels, out_channels, 2, 2) {}
  vg::nn::ConvTranspose3d conv;
  VG_MODULE(conv)
  Tensor forward(const Tensor& x) const override { return vg::slice(conv(x), 2, 1, 2 * x.size(2)); }
};

/// Group normalization, a scale and a shift, SiLU, and a causal convolution. Each frame is normalized by itself, so
/// that the layer is causal. A linear layer maps the condition (N, K) to the scale and the shift of each channel.
struct ConditionalConv : vg::nn::Module {
  ConditionalConv(int64_t in_channels, int64_t out_channels, int64_t conditions)
      : affine(conditions, 2 * in_channels), conv(in_channels, out_channels) {}
  vg::nn::Linear affine;
  CausalConv conv;
  VG_MODULE(affine, conv)
  Tensor forward(const Tensor& x, const Tensor& condition) const {
    const Tensor frames = x.transpose(1, 2);  // (N, T, C, H, W)
    const Tensor normal = vg::group_norm(frames.flatten(0, 1), 4).reshape(frames.shape()).transpose(1, 2);
    const vg::Tensors parts = affine(condition).reshape({x.size(0), -1, 1, 1, 1}).chunk(2, 1);
    return conv(vg::silu(normal * (1 + parts[0]) + parts[1]));
  }
};

/// Adds the result of two successive conditional convolutions to x.
struct ResidualBlock : vg::nn::Module {
  ResidualBlock(int64_t channels, int64_t conditions)
      : conv1(channels, channels, conditions), conv2(channels, channels, conditions) {}
  ConditionalConv conv1, conv2;
  VG_MODULE(conv1, conv2)
  Tensor forward(const Tensor& x, const Tensor& condition) const { return x + conv2(conv1(x, condition), condition); }
};

/// Maps a latent video (N, latent, T, H, W) and a condition (N, conditions) to a video (N, 1, 4 T - 3, 4 H, 4 W).
struct Decoder : vg::nn::Module {
  Decoder(int64_t latent, int64_t channels, int64_t conditions)
      : first(latent, channels),
        block1(channels, conditions),
        up1(channels, channels / 2),
        block2(channels / 2, conditions),
        up2(channels / 2, channels / 2),
        last(channels / 2, 1, conditions) {}
  CausalConv first;
  ResidualBlock block1;
  Upsample up1;
  ResidualBlock block2;
  Upsample up2;
  ConditionalConv last;
  VG_MODULE(first, block1, up1, block2, up2, last)
  Tensor forward(const Tensor& latent, const Tensor& condition) const {
    const Tensor x = up1(block1(first(latent), condition));
    return last(up2(block2(x, condition)), condition);
  }
};

}  // namespace video
