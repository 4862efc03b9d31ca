// The layers of a variational auto-encoder (VAE) for videos, and its decoder. The layers are causal: a frame of the
// result does not depend on later frames. In shapes, T is the number of frames.
#pragma once

#include <voxgrad.h>

namespace video {
namespace vg = voxgrad;
namespace nn = voxgrad::nn;
using vg::Tensor;

/// Returns a 3 x 3 x 3 convolution of (N, C, T, H, W). A frame of the result depends on the same frame of the input and
/// two earlier frames. With stride 2, T becomes (T + 1) / 2.
inline nn::Sequential causal_conv(int64_t in_channels, int64_t out_channels, int64_t stride = 1) {
  return nn::Sequential(nn::ZeroPad3d({0, 0, 0, 0, 2, 0}), nn::Conv3d(in_channels, out_channels, 3, stride, {0, 1, 1}));
}

/// Returns a transposed convolution that doubles H and W. T becomes 2 T - 1, because a negative padding removes the
/// first frame of the result.
inline nn::Sequential upsample(int64_t in_channels, int64_t out_channels) {
  return nn::Sequential(nn::ConvTranspose3d(in_channels, out_channels, 2, 2), nn::ZeroPad3d({0, 0, 0, 0, -1, 0}));
}

/// Group normalization, a scale and a shift, SiLU, and a causal convolution. Each frame is normalized by itself, so
/// that the layer is causal. A linear layer maps the condition (N, K) to the scale and the shift of each channel.
struct ConditionalConv : nn::Module {
  ConditionalConv(int64_t in_channels, int64_t out_channels, int64_t conditions)
      : affine(conditions, 2 * in_channels), conv(causal_conv(in_channels, out_channels)) {}
  nn::Linear affine;
  nn::Sequential conv;
  VG_MODULE(affine, conv)
  Tensor forward(const Tensor& x, const Tensor& condition) const {
    const Tensor frames = x.transpose(1, 2);  // (N, T, C, H, W)
    const Tensor normal = vg::group_norm(frames.flatten(0, 1), 4).reshape(frames.shape()).transpose(1, 2);
    const vg::Tensors parts = affine(condition).reshape({x.size(0), -1, 1, 1, 1}).chunk(2, 1);
    return conv(vg::silu(normal * (1 + parts[0]) + parts[1]));
  }
};

/// Maps a latent video (N, latent, T, H, W) and a condition (N, conditions) to a video (N, 1, 4 T - 3, 4 H, 4 W).
template <int64_t latent, int64_t channels, int64_t conditions>
struct Decoder : nn::Module {
  nn::Sequential first = causal_conv(latent, channels);
  ConditionalConv conv1{channels, channels, conditions};
  ConditionalConv conv2{channels, channels, conditions};
  nn::Sequential up1 = upsample(channels, channels / 2);
  ConditionalConv conv3{channels / 2, channels / 2, conditions};
  ConditionalConv conv4{channels / 2, channels / 2, conditions};
  nn::Sequential up2 = upsample(channels / 2, channels / 2);
  ConditionalConv last{channels / 2, 1, conditions};
  VG_MODULE(first, conv1, conv2, up1, conv3, conv4, up2, last)
  Tensor forward(const Tensor& x, const Tensor& condition) const {
    const Tensor a = first(x);
    const Tensor b = up1(a + conv2(conv1(a, condition), condition));
    return last(up2(b + conv4(conv3(b, condition), condition)), condition);
  }
};

}  // namespace video
