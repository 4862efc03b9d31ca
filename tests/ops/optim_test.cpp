// Tests optimizer steps on lists of parameters. tests/nn compares the results of many steps with PyTorch.
#include "ops/optim.h"

#include <cmath>

#include "core/autograd.h"
#include "core/profiler.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(OptimSteps, AcceptListsOfMixedShapesDtypesAndDevices) {
  Tensors params, grads, squares;
  for (Device device : devices())
    for (DType dtype : {f32, f64}) {
      const TensorOptions options{.dtype = dtype, .device = device};
      for (const Shape& shape : {Shape{}, Shape{3}, Shape{2, 0}, Shape{2, 5}}) {
        params.push_back(full(shape, 1, options).requires_grad_());
        grads.push_back(full(shape, 0.5, options));
        squares.push_back(zeros(shape, options));
      }
    }
  optimizer_step(params, grads, {}, SgdStep{.lr = 0.5});
  optimizer_step(params, grads, {squares}, RmspropStep{.lr = 0.25, .alpha = 0.75, .eps = 0});
  for (const Tensor& param : params)
    for (double value : param.to_vector()) EXPECT_DOUBLE_EQ(value, 0.75 - 0.25 * 0.5 / std::sqrt(0.25 * 0.25));
  optimizer_step({}, {}, {}, SgdStep{.lr = 1});
}

TEST(OptimSteps, AcceptGradientsWithAnyStrides) {
  const Tensors params{zeros({2, 3})}, grads{arange(0, 6).reshape({3, 2}).transpose(0, 1)};
  const Tensors first{zeros({2, 3})}, second{zeros({2, 3})};
  optimizer_step(params, grads, {}, SgdStep{.lr = 1});
  EXPECT_EQ(params[0].to_vector(), (std::vector<double>{0, -2, -4, -1, -3, -5}));
  optimizer_step(params, grads, {first, second}, AdamStep{.lr = 1, .beta1 = 0.5, .beta2 = 0, .eps = 1});
  EXPECT_FLOAT_EQ(params[0].at<float>({1, 2}), -5 - 5.0F / 6);
  EXPECT_EQ(first[0].at({1, 2}), 2.5);
  EXPECT_EQ(second[0].at({0, 1}), 4);
}

TEST(OptimSteps, AreProfiledWithTheBytesThatTheyAccess) {
  const Tensors params{ones({100})}, grads{ones({100})}, states{ones({100})};
  profiler::Session profile;
  optimizer_step(params, grads, {states}, SgdStep{.momentum = 0.5});
  optimizer_step(params, grads, {states}, EmaStep{});
  unscale_gradients(grads, zeros({1}, {.dtype = i64}), ones({1}), /*write=*/false);
  profile.stop();
  const auto bytes_of = [&](const std::string& name) {
    for (const profiler::Row& row : profile.rows())
      if (row.name == name) return row.bytes;
    return -1.0;
  };
  EXPECT_EQ(bytes_of("sgd_step"), 400 * 5);  // reads and writes parameters and states, reads gradients
  EXPECT_EQ(bytes_of("ema_step"), 400 * 4);  // does not write the parameters
  EXPECT_EQ(bytes_of("unscale_gradients"), 400 * 2);
}

TEST(OptimSteps, CountAsInPlaceWritesForAutograd) {
  const Tensors params{ones({2}, {.requires_grad = true})}, grads{ones({2})};
  const Tensor loss = sum(params[0] * params[0]);
  optimizer_step(params, grads, {}, SgdStep{.lr = 1});
  EXPECT_ERROR(loss.backward(), "written");
}

TEST(OptimSteps, RejectMismatchedListsWithoutChangingParameters) {
  const Tensors params{ones({2}), ones({3})}, grads{ones({2}), ones({3})}, wrong_shape{ones({2}), ones({4})};
  const Tensors wrong_dtype{ones({2}), ones({3}, {.dtype = f64})}, undefined{ones({2}), Tensor()};
  const Tensors integers{ones({2}, {.dtype = i32})}, columns{ones({2, 2}).transpose(0, 1)}, square{ones({2, 2})};
  EXPECT_ERROR(optimizer_step(params, Tensors{ones({2})}, {}, SgdStep{.lr = 1}),
               "sgd_step: the number of gradients must be 2, got 1");
  EXPECT_ERROR(optimizer_step(params, wrong_shape, {}, SgdStep{.lr = 1}),
               "sgd_step: parameter 1 is [3] f32 on cpu, but its entry in gradients is [4] f32 on cpu");
  EXPECT_ERROR(optimizer_step(params, wrong_dtype, {}, SgdStep{.lr = 1}), "its entry in gradients is [3] f64 on cpu");
  EXPECT_ERROR(optimizer_step(params, undefined, {}, SgdStep{.lr = 1}), "its entry in gradients is undefined");
  EXPECT_ERROR(optimizer_step(undefined, grads, {}, SgdStep{.lr = 1}), "sgd_step: parameter 1 is undefined");
  EXPECT_ERROR(optimizer_step(integers, integers, {}, SgdStep{.lr = 1}),
               "parameters must have a floating-point dtype, parameter 0 is [2] i32");
  EXPECT_ERROR(optimizer_step(columns, square, {}, SgdStep{.lr = 1}),
               "sgd_step: parameter 0 is neither contiguous nor channels_last: [2, 2] f32");
  EXPECT_ERROR(optimizer_step(params, grads, {}, SgdStep{.momentum = 0.5}),
               "sgd_step: the number of momentum_buffers must be 2, got 0");
  EXPECT_ERROR(optimizer_step(params, grads, {grads}, SgdStep{.lr = 1}),
               "sgd_step: the number of momentum_buffers must be 0, got 2");
  EXPECT_ERROR(optimizer_step(square, square, {columns}, SgdStep{.momentum = 0.5}),
               "its entry in momentum_buffers is [2, 2] f32 on cpu, in another memory format");
  EXPECT_ERROR(optimizer_step(params, grads, {grads, grads}, AdamStep{.step = 0}),
               "adam_step: step must be at least 1, got 0");
  EXPECT_ERROR(optimizer_step(params, grads, {grads, grads}, AdamStep{.amsgrad = true}),
               "adam_step: the number of max_exp_avg_sqs must be 2, got 0");
  EXPECT_ERROR(optimizer_step(params, grads, {wrong_shape}, RmspropStep{}),
               "its entry in square_avgs is [4] f32 on cpu");
  for (const Tensor& param : params)
    for (double value : param.to_vector()) EXPECT_EQ(value, 1);
}

}  // namespace
}  // namespace voxgrad
