// Tests of the padding of convolution layers: "same", "valid" and the padding modes.
#include "core/autograd.h"
#include "nn/layers.h"
#include "nn/weight_norm.h"
#include "ops/create.h"
#include "ops/pad.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using Values = std::vector<double>;

/// Returns a layer that sums each window of `size` elements.
nn::Conv1d window(int64_t size, const nn::ConvPadding<1>& padding, PadMode mode) {
  nn::Conv1d conv{{.in_channels = 1,
                   .out_channels = 1,
                   .kernel_size = size,
                   .padding = padding,
                   .bias = false,
                   .padding_mode = mode}};
  conv.weight.detach().fill_(1);
  return conv;
}

TEST(ConvPadding, PadsAccordingToTheMode) {
  const Tensor x = reshape(tensor({1, 2, 3, 4}), {1, 1, 4});
  struct Case {
    PadMode mode;
    Values three;  // sums of windows of three elements
    Values two;    // sums of windows of two elements
  };
  for (const Case& c :
       {Case{PadMode::zeros, {3, 6, 9, 7}, {3, 5, 7, 4}}, Case{PadMode::reflect, {5, 6, 9, 10}, {3, 5, 7, 7}},
        Case{PadMode::replicate, {4, 6, 9, 11}, {3, 5, 7, 8}}, Case{PadMode::circular, {7, 6, 9, 8}, {3, 5, 7, 5}}}) {
    EXPECT_EQ(window(3, 1, c.mode)(x).to_vector(), c.three) << c.mode;
    EXPECT_EQ(window(3, "same", c.mode)(x).to_vector(), c.three) << c.mode;
    EXPECT_EQ(window(2, "same", c.mode)(x).to_vector(), c.two) << c.mode;
    EXPECT_EQ(window(3, "valid", c.mode)(x).to_vector(), (Values{6, 9})) << c.mode;
    EXPECT_EQ(window(2, "same", c.mode)(select(x, 0, 0)).to_vector(), c.two) << c.mode << ", without a batch";
  }
}

/// Expects that conv(x) and its gradient equal those of an unpadded convolution of pad(x, amounts).
void expect_padded(const nn::Conv3d& conv, const std::vector<int64_t>& amounts) {
  manual_seed(4);
  const Tensor x = randn({2, 2, 5, 6, 7}).requires_grad_(), again = x.detach().clone().requires_grad_();
  const Tensor y = conv(x);
  const Tensor expected = conv3d(pad(again, amounts, conv.options().padding_mode), conv.weight, conv.bias,
                                 {.dilation = conv.options().dilation});
  EXPECT_EQ(y.shape(), (Shape{2, 3, 5, 6, 7}));
  EXPECT_EQ(y.to_vector(), expected.to_vector());
  const Tensor g = randn(y.shape());
  (y * g).sum().backward();
  (expected * g).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), again.grad().to_vector());
}

TEST(ConvPadding, SameKeepsTheSizesOfVolumes) {
  for (const PadMode mode : {PadMode::zeros, PadMode::reflect, PadMode::replicate, PadMode::circular}) {
    const auto layer = [&](const Triple& kernel, const Triple& dilation) {
      return nn::Conv3d(2, 3, kernel, 1, "same", dilation, 1, true, mode);
    };
    expect_padded(layer({3, 1, 5}, {1, 1, 1}), {2, 2, 0, 0, 1, 1});
    expect_padded(layer({2, 3, 4}, {1, 2, 1}), {1, 2, 2, 2, 0, 1});
  }
}

TEST(ConvPadding, FusedAndChannelsLastLayersMatchSeparateLayers) {
  for (const PadMode mode : {PadMode::zeros, PadMode::circular}) {
    nn::Sequential model{nn::Conv3d(2, 4, 2, 1, "same", 1, 1, true, mode), nn::ReLU(), nn::GroupNorm(2, 4)};
    const Tensor x = randn({1, 2, 4, 4, 4});
    const auto& conv = static_cast<const nn::Conv3d&>(model[0]);
    const Tensor expected = static_cast<const nn::GroupNorm&>(model[2])(relu(conv(x)));
    const auto expect_near = [&](const Tensor& y) {
      const Values values = y.to_vector(), wanted = expected.to_vector();
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(values[i], wanted[i], 1e-5) << mode;
    };
    expect_near(model(x));
    model.to(MemoryFormat::channels_last);
    EXPECT_EQ(model(x).suggest_memory_format(), MemoryFormat::channels_last);
    expect_near(model(x));
    const nn::WeightNorm wrapped(nn::Conv3d(2, 4, 2, 1, "same", 1, 1, true, mode));
    EXPECT_EQ(wrapped(x).shape(), (Shape{1, 4, 4, 4, 4}));
  }
}

TEST(ConvPadding, RejectsBadOptions) {
  EXPECT_ERROR(nn::Conv3d(1, 1, 3, 1, "full"), "Conv: padding must be numbers, 'same' or 'valid', got 'full'");
  EXPECT_ERROR(nn::Conv2d(1, 1, 3, {1, 2}, "same"), "Conv2d: padding 'same' needs stride 1, got stride [1, 2]");
  EXPECT_ERROR(window(3, 4, PadMode::reflect)(ones({1, 1, 4})), "pad: an axis of size 4 can be padded by at most 3");
  EXPECT_EQ(nn::Conv2d(1, 1, 3, 2, "valid")(ones({1, 1, 5, 5})).shape(), (Shape{1, 1, 2, 2}));
}

}  // namespace
}  // namespace voxgrad
