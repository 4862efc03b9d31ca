// The convolution kernels behind a C interface, so that compare_gpu.py can time them and PyTorch's in one process,
// in turn, on the same buffers.
#include <exception>
#include <string>

#include "core/precision.h"
#include "cuda/conv/plan.h"
#include "ops/kernels.h"

namespace {

using namespace voxgrad;

thread_local std::string message;

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

}  // namespace

extern "C" {

/// What the planner is to choose from now on (cuda/conv/plan.h: ConvChoice).
void voxgrad_force_conv(int plain, int mma_sync, int slots, int pairs, int width) {
  cuda::force_conv_choice({.plain = plain != 0,
                           .mma_sync = mma_sync != 0,
                           .slots = static_cast<int8_t>(slots),
                           .pairs = static_cast<int8_t>(pairs),
                           .width = static_cast<int16_t>(width)});
}

/// One kernel of a transposed convolution x (N, Cin, ...) -> y (N, Cout, ...) with weight (Cin, Cout / groups, ...):
/// what = 0: y from x and w, 1: x from y and w (the data gradient), 2: w from x and y. dtype: 0 f32, 2 bf16, 3 f16.
/// Returns null or a message.
const char* voxgrad_conv_transpose(int what, int dtype, int high, int channels_last, void* x, void* w, void* y,
                                   const int64_t* x_size, const int64_t* w_size, const int64_t* y_size,
                                   const int64_t* stride, const int64_t* padding, const int64_t* dilation,
                                   int64_t groups) {
  try {
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
               ws = view_of(w, type, w_size, false);
    const Kernels& kernel = cuda_kernels();
    if (what == 0) kernel.conv_backward_data(ys, xs, ws, nullptr, geometry);
    if (what == 1) kernel.conv_forward(xs, ys, ws, nullptr, geometry);
    if (what == 2) kernel.conv_backward_weight(ws, ys, xs, geometry);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
}
