// Tests that convolutions reject invalid calls.
#include <gtest/gtest.h>

#include "ops/conv.h"
#include "tests/ops/bad_call.h"

namespace voxgrad {
namespace {

TEST(OpErrors, ConvolutionRejectsInvalidChannels) {
  const Tensor x = floats({2, 32, 8, 8, 8});
  const BadCall table[] = {
      {[&] {
         conv_transpose3d(x, floats({64, 16, 4, 4, 4}));
       },
       "conv_transpose3d: weight expects 64 input channels, input has 32 (input [2, 32, 8, 8, 8], weight [64, 16, 4, "
       "4, 4])"},
      {[&] {
         conv3d(x, floats({8, 16, 3, 3, 3}));
       },
       "conv3d: weight expects 16 input channels, input has 32 (input"},
      {[&] {
         conv3d(x, floats({6, 8, 3, 3, 3}), {}, {.groups = 4});
       },
       "groups 4 does not divide the output channel count 6"},
      {[&] {
         conv_transpose3d(x, floats({32, 8, 3, 3, 3}), {}, {.groups = 3});
       },
       "groups 3 does not divide the input channel count 32"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, ConvolutionRejectsInvalidOptions) {
  const Tensor x = floats({2, 32, 8, 8, 8});
  const BadCall table[] = {
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), {}, {.groups = 0});
       },
       "groups must be positive"},
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), {}, {.stride = 0});
       },
       "stride must lie in [1, 2^31), got "},
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), {}, {.padding = -1});
       },
       "padding must lie in [0, 2^31), got "},
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), {}, {.dilation = {1, 0, 1}});
       },
       "dilation must lie in [1, 2^31), got "},
      {[&] {
         conv3d(x, floats({8, 32, 9, 1, 1}));
       },
       "conv3d: the dilated kernel is larger than the padded input: the result would have 0 elements along axis 2 with "
       "stride [1, 1, 1], padding [0, 0, 0], dilation [1, 1, 1] (input [2, 32, 8, 8, 8], weight [8, 32, 9, 1, 1])"},
      {[&] {
         conv2d(floats({3, 8, 5}), floats({8, 3, 1, 4}), {}, {.stride = 2, .padding = {0, 1}, .dilation = 5});
       },
       "the result would have -4 elements along axis 2 with stride [2, 2], padding [0, 1], dilation [5, 5] (input [3, "
       "8, 5], weight [8, 3, 1, 4])"},
      {[&] {
         conv1d(floats({3, 2}), floats({8, 3, 4}));
       },
       "the result would have -1 elements along axis 1"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, ConvolutionRejectsInvalidOperands) {
  const Tensor x = floats({2, 32, 8, 8, 8});
  const BadCall table[] = {
      {[&] {
         conv3d(x, floats({8, 32, 3, 3}));
       },
       "weight must have 5 axes"},
      {[&] {
         conv3d(floats({8, 4, 4, 4}), floats({8, 32, 3, 3, 3}));
       },
       "weight expects 32 input channels, input has 8 (input [8, 4, 4, 4], weight [8, 32, 3, 3, 3]); an input without "
       "a batch begins with its channels: use unsqueeze(1) if the first axis is the batch"},
      {[&] {
         conv3d(x, floats({8, 3, 3, 3, 3}), {}, {.groups = 2});
       },
       "weight expects 6 input channels in all groups together, input has 32 (input"},
      {[&] {
         conv3d(floats({0, 4, 4, 4}), floats({8, 32, 3, 3, 3}));
       },
       "input has an empty axis other than the batch (input [0, 4, 4, 4]"},
      {[&] {
         conv3d(floats({32, 8, 8}), floats({8, 32, 3, 3, 3}));
       },
       "input must have 5 axes, or 4 without a batch"},
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), floats({7}));
       },
       "bias must have shape [8], got [7]"},
      {[&] {
         conv3d(x, zeros({8, 32, 3, 3, 3}, {.dtype = f64}));
       },
       "conv3d: dtypes differ: input [2, 32, 8, 8, 8] f32 on cpu and weight [8, 32, 3, 3, 3] f64 on cpu; convert one"},
      {[&] {
         conv3d(x, floats({8, 32, 3, 3, 3}), zeros({8}, {.dtype = f64}));
       },
       "dtypes differ: input [2, 32, 8, 8, 8] f32 on cpu and bias [8] f64 on cpu"},
      {[&] {
         conv3d(integers({1, 1, 3, 3, 3}), integers({1, 1, 1, 1, 1}));
       },
       "needs a floating-point dtype"},
      {[&] { conv3d(Tensor(), x); }, "conv3d: input is undefined"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

TEST(OpErrors, TransposedConvolutionRejectsInvalidOptions) {
  const Tensor x = floats({2, 32, 8, 8, 8});
  const BadCall table[] = {
      {[&] {
         conv_transpose3d(x, floats({32, 8, 3, 3, 3}), {}, {.stride = 2, .output_padding = 2});
       },
       "output_padding must be smaller than stride or dilation"},
      {[&] {
         conv_transpose3d(x, floats({32, 8, 3, 3, 3}), {}, {.output_padding = -1});
       },
       "output_padding must lie in [0, 2^31), got "},
      {[&] {
         conv_transpose3d(x, floats({32, 8, 1, 1, 1}), {}, {.padding = 4});
       },
       "the result would have 0 elements along axis 2 with stride [1, 1, 1], padding [4, 4, 4], dilation [1, 1, 1]"},
      {[&] {
         conv_transpose3d(x, floats({32, 8, 3, 3, 3}), {}, {.stride = 2, .output_size = 30});
       },
       "is out of range: axis 2 allows 17 to 18"},
      {[&] {
         conv_transpose3d(floats({1, 1, 8, 8, 8}), floats({1, 1, 1, 1, 1}), {}, {.stride = 1 << 30});
       },
       "64 bits"},
  };
  for (const BadCall& bad : table) EXPECT_ERROR(bad.call(), bad.message);
}

}  // namespace
}  // namespace voxgrad
