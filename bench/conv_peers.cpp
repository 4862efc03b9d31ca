// voxgrad behind a C interface, so that it and PyTorch can be timed in one process, in turn, on the same buffers: the
// convolution kernels for compare_gpu.py, a model for compare_model.py. Work is queued on CUDA's default stream.
#include <memory>
#include <string>
#include <utility>

#include "bench/run_caught.h"
#include "core/autograd.h"
#include "core/device.h"
#include "core/error.h"
#include "core/precision.h"
#include "cuda/conv/plan.h"
#include "nn/conv_layers.h"
#include "nn/layers.h"
#include "nn/norm_layers.h"
#include "nn/sequential.h"
#include "ops/detail/kernels.h"

namespace {

using namespace voxgrad;

View view_of(void* data, DType dtype, const int64_t* size, bool channels_last) {
  View view{.data = data, .dtype = dtype, .device = 0, .rank = 5};
  constexpr int kFirst[] = {4, 3, 2, 1, 0}, kLast[] = {1, 4, 3, 2, 0};  // innermost first
  int64_t stride = 1;
  for (const int axis : channels_last ? kLast : kFirst) {
    view.size[axis] = size[axis];
    view.stride[axis] = stride;
    stride *= size[axis];
  }
  return view;
}

constexpr Device kDevice = Device::cuda();

/// Memory of another program as a contiguous f32 tensor.
Tensor tensor_over(void* data, const Shape& shape, bool requires_grad) {
  return from_blob(data, shape, {f32, kDevice, requires_grad}, {});
}

/// ConvTranspose3d without bias, ReLU, GroupNorm, and what their last run gave.
struct Model {
  nn::Sequential layers;
  Tensor x, output;

  void drop_results() {
    x = output = {};
    layers.zero_grad();
  }
  /// Forward alone, unrecorded, if `gradient` is null.
  void run(void* input, const Shape& shape, void* gradient) {
    drop_results();
    const GradModeGuard recording(gradient != nullptr);
    x = tensor_over(input, shape, true);
    const Tensor y = layers(x);
    if (gradient) y.backward(tensor_over(gradient, y.shape(), false));
    output = y.detach();
  }
  /// The output, then the gradients of the input, the convolution's weight, and GroupNorm's weight and bias.
  Tensor result(size_t which) const {
    if (which == 0) return output;
    return which == 1 ? x.grad() : layers.parameters().at(which - 2).grad();
  }
};
std::unique_ptr<Model> model;

Model& made_model() {
  check(model != nullptr, "voxgrad_model", "voxgrad_model_make has to come first");
  return *model;
}

Shape shape_of(const int64_t* size) { return {size[0], size[1], size[2], size[3], size[4]}; }

}  // namespace

extern "C" {

/// What the planner is to choose from now on (cuda/conv/plan.h: ConvChoice).
void voxgrad_force_conv(int plain, int mma_sync, int small_channel, int unsplit, int k_blocks, int m_tiles, int pairs,
                        int width, int slide) {
  cuda::force_conv_choice({.plain = plain != 0,
                           .mma_sync = mma_sync != 0,
                           .small_channel = small_channel != 0,
                           .unsplit = unsplit != 0,
                           .slide = static_cast<uint8_t>(slide & 3),
                           .k_blocks = static_cast<int8_t>(k_blocks),
                           .m_tiles = static_cast<int8_t>(m_tiles),
                           .pairs = static_cast<int8_t>(pairs),
                           .width = static_cast<int16_t>(width)});
}

/// One pass of a convolution, or of a transposed one, x (N, Cin, ...) -> y (N, Cout, ...) with a weight of
/// PyTorch's shape: (Cout, Cin / groups, ...), transposed (Cin, Cout / groups, ...). what = 0: y from x and w, 1: x
/// from y and w (the data gradient), 2: w from x and y, 3: both gradients as autograd makes them, dx from y and w, dw
/// from x and y. dtype: 0 f32, 2 bf16, 3 f16. Returns null or a message.
const char* voxgrad_conv(int transposed, int what, int dtype, int high, int channels_last, void* x, void* w, void* y,
                         void* dx, void* dw, const int64_t* x_size, const int64_t* w_size, const int64_t* y_size,
                         const int64_t* stride, const int64_t* padding, const int64_t* dilation, int64_t groups) {
  return run_caught([&] {
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    const auto type = static_cast<DType>(dtype);
    ConvGeometry geometry;
    geometry.groups = groups;
    for (int a = 0; a < 3; ++a) {
      geometry.stride[a] = stride[a];
      geometry.padding[a] = padding[a];
      geometry.dilation[a] = dilation[a];
    }
    const View xs = view_of(x, type, x_size, channels_last), ys = view_of(y, type, y_size, channels_last),
               ws = view_of(w, type, w_size, channels_last);
    const View &from = transposed ? ys : xs, &to = transposed ? xs : ys;  // of the convolution that is transposed
    const Kernels& kernel = cuda_kernels();
    if (what == 2) return kernel.conv_backward_weight(ws, from, to, geometry);
    if (what < 2) {
      const bool forward = (what == 1) == (transposed != 0);
      return forward ? kernel.conv_forward(to, from, ws, nullptr, geometry)
                     : kernel.conv_backward_data(from, to, ws, nullptr, geometry);
    }
    const View dxs = view_of(dx, type, x_size, channels_last), dws = view_of(dw, type, w_size, channels_last);
    transposed ? kernel.conv_forward(dxs, ys, ws, nullptr, geometry)
               : kernel.conv_backward_data(dxs, ys, ws, nullptr, geometry);
    kernel.conv_backward_weight(dws, from, to, geometry);
  });
}

// The functions of the model return null or a message. Tensors are contiguous f32; x and g have five sizes.

/// Makes the model over these parameters, in TF32: the convolution's weight (Cin, Cout, kernel...), GroupNorm's weight
/// and bias (Cout).
const char* voxgrad_model_make(int64_t in_channels, int64_t out_channels, int64_t kernel_size, int64_t num_groups,
                               void* weight, void* norm_weight, void* norm_bias) {
  return run_caught([&] {
    set_float32_precision(Float32Precision::high);
    nn::ConvTranspose3d conv(
        {.in_channels = in_channels, .out_channels = out_channels, .kernel_size = kernel_size, .bias = false});
    conv.weight = tensor_over(weight, conv.weight.shape(), true);
    nn::GroupNorm norm(num_groups, out_channels);
    norm.weight = tensor_over(norm_weight, {out_channels}, true);
    norm.bias = tensor_over(norm_bias, {out_channels}, true);
    model = std::make_unique<Model>(Model{nn::Sequential{std::move(conv), nn::ReLU{}, std::move(norm)}, {}, {}});
  });
}

/// Forward alone if g is null, else forward and backward from the output's gradient g.
const char* voxgrad_model_run(void* x, const int64_t* x_size, void* g) {
  return run_caught([&] { made_model().run(x, shape_of(x_size), g); });
}

/// Forward and backward; `bytes` is the most memory that it held at once beyond what was held before.
const char* voxgrad_model_peak(void* x, const int64_t* x_size, void* g, int64_t* bytes) {
  return run_caught([&] {
    made_model().drop_results();
    memory::reset_peak(kDevice);
    const int64_t before = memory::stats(kDevice).current;
    model->run(x, shape_of(x_size), g);
    *bytes = memory::stats(kDevice).peak - before;
  });
}

/// Copies a result of the last run into memory of its size; `which` as in Model::result.
const char* voxgrad_model_result(int which, void* to) {
  return run_caught([&] {
    const Tensor result = made_model().result(static_cast<size_t>(which));
    tensor_over(to, result.shape(), false).copy_(result);
  });
}
}
