// A causal video VAE whose decoder is conditioned: the latent video holds the motion, and the condition the shape.
#pragma once

#include <voxgrad.h>

namespace video {
namespace vg = voxgrad;
using vg::Tensor;

/// A 3 x 3 x 3 convolution of (N, C, T, H, W). A frame of the result depends on the same frame of x and two earlier
/// frames. With stride 2, T becomes (T + 1) / 2, so that the first frame keeps a latent frame of its own.
struct CausalConv : vg::nn::Layer {
  CausalConv(int64_t in_channels, int64_t out_channels, int64_t stride = 1)
      : conv(in_channels, out_channels, 3, stride, vg::Extent<3>(0, 1, 1)) {}
  vg::nn::Conv3d conv;
  VG_MODULE(conv)
  Tensor forward(const Tensor& x) const override { return conv(vg::pad(x, {0, 0, 0, 0, 2, 0})); }
};

/// A transposed convolution that doubles H and W. T becomes 2 T - 1: each frame gives two frames, but the first frame
/// gives one.
struct Upsample : vg::nn::Layer {
  Upsample(int64_t in_channels, int64_t out_channels) : conv(in_channels, out_channels, 2, 2) {}
  vg::nn::ConvTranspose3d conv;
  VG_MODULE(conv)
  Tensor forward(const Tensor& x) const override { return vg::slice(conv(x), 2, 1, 2 * x.size(2)); }
};

/// Group normalization of each frame by itself, so that it is causal too. A linear layer maps the condition (N, K) to
/// the scale and the shift of each channel.
struct ConditionalNorm : vg::nn::Module {
  ConditionalNorm(int64_t channels, int64_t conditions) : affine(conditions, 2 * channels) {}
  vg::nn::Linear affine;
  VG_MODULE(affine)
  Tensor forward(const Tensor& x, const Tensor& condition) {
    const Tensor frames = x.transpose(1, 2);  // (N, T, C, H, W)
    const Tensor normal = vg::group_norm(frames.flatten(0, 1), 4).reshape(frames.shape()).transpose(1, 2);
    const vg::Tensors parts = affine(condition).reshape({x.size(0), -1, 1, 1, 1}).chunk(2, 1);
    return normal * (1 + parts[0]) + parts[1];
  }
};

/// Adds to x two times normalization, SiLU and causal convolution.
struct ResidualBlock : vg::nn::Module {
  ResidualBlock(int64_t channels, int64_t conditions)
      : norm1(channels, conditions),
        norm2(channels, conditions),
        conv1(channels, channels),
        conv2(channels, channels) {}
  ConditionalNorm norm1, norm2;
  CausalConv conv1, conv2;
  VG_MODULE(norm1, norm2, conv1, conv2)
  Tensor forward(const Tensor& x, const Tensor& condition) {
    return x + conv2(vg::silu(norm2(conv1(vg::silu(norm1(x, condition))), condition)));
  }
};

/// Maps a latent video (N, latent, T, H, W) and a condition (N, conditions) to a video (N, 1, 4 T - 3, 4 H, 4 W).
struct Decoder : vg::nn::Module {
  Decoder(int64_t latent, int64_t channels, int64_t conditions)
      : first(latent, channels),
        block1(channels, conditions),
        up1(channels, channels / 2),
        block2(channels / 2, conditions),
        up2(channels / 2, channels / 2),
        norm(channels / 2, conditions),
        last(channels / 2, 1) {}
  CausalConv first;
  ResidualBlock block1;
  Upsample up1;
  ResidualBlock block2;
  Upsample up2;
  ConditionalNorm norm;
  CausalConv last;
  VG_MODULE(first, block1, up1, block2, up2, norm, last)
  Tensor forward(const Tensor& latent, const Tensor& condition) {
    const Tensor x = up1(block1(first(latent), condition));
    return last(vg::silu(norm(up2(block2(x, condition)), condition)));
  }
};

}  // namespace video
