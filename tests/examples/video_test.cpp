// Tests of the decoder of the example `video`. Compares outputs and gradients with PyTorch's results (recorded by
// video_decoder.py).
#include <gtest/gtest.h>

#include <algorithm>

#include "examples/video/model.h"

namespace video {
namespace {

/// Returns the largest absolute difference of elements, divided by max(1, m), where m is the largest absolute element
/// of `b`. The lower bound of 1 is for biases before a normalization of single channels: their gradient is 0 except for
/// rounding, which depends on the instructions of the processor.
double difference(const Tensor& a, const Tensor& b) {
  return vg::amax(vg::abs(a - b)).item() / std::max(1.0, vg::amax(vg::abs(b)).item());
}

TEST(VideoDecoder, MatchesPyTorch) {
  const vg::TensorMap data = vg::load_safetensors(TESTS_DIR "/examples/video_decoder.safetensors");
  Decoder<2, 8, 3> decoder;
  vg::TensorMap state;
  for (const auto& [name, tensor] : data)
    if (name.starts_with("state.")) state[name.substr(6)] = tensor;
  decoder.load_state_dict(state);

  const Tensor latent = data.at("latent").clone().requires_grad_();
  const Tensor condition = data.at("condition").clone().requires_grad_();
  const Tensor output = decoder(latent, condition);
  ASSERT_EQ(output.shape(), data.at("output").shape());
  EXPECT_LT(difference(output, data.at("output")), 1e-5);

  output.backward(data.at("grad_output"));
  EXPECT_LT(difference(latent.grad(), data.at("grad.latent")), 1e-5);
  EXPECT_LT(difference(condition.grad(), data.at("grad.condition")), 1e-5);
  for (const auto& [name, parameter] : decoder.named_parameters())
    EXPECT_LT(difference(parameter.grad(), data.at("grad." + name)), 5e-5) << name;
}

// Latent frame t affects the frames of the video from number 4 t - 3 on.
TEST(VideoDecoder, IsCausal) {
  vg::manual_seed(1);
  const Decoder<2, 8, 3> decoder;
  const Tensor condition = vg::randn({1, 3});
  const Tensor latent = vg::randn({1, 2, 5, 3, 2});
  const Tensor before = decoder(latent, condition);
  EXPECT_EQ(before.shape(), (vg::Shape{1, 1, 17, 12, 8}));
  for (int64_t t = 0; t < 5; ++t) {
    const Tensor changed = latent.clone();
    changed.select(2, t).fill_(7);
    const Tensor change = vg::amax(vg::abs(decoder(changed, condition) - before), {0, 1, 3, 4});
    for (int64_t frame = 0; frame < 17; ++frame)
      EXPECT_EQ(change.at({frame}) > 0, frame >= 4 * t - 3) << "latent frame " << t << ", frame " << frame;
  }
}

}  // namespace
}  // namespace video
