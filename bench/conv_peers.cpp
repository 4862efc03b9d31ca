// A C interface to voxgrad's convolution kernels (for compare_gpu.py and conv_plans.py) and to a model (for
// compare_model.py). compare_*.py time voxgrad and PyTorch alternately in one process on the same buffers. Work is
// queued on CUDA's default stream.
#include <array>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench/run_caught.h"
#include "core/autograd.h"
#include "core/device.h"
#include "core/error.h"
#include "core/precision.h"
#include "cuda/conv/plan/choose.h"
#include "nn/conv_layers.h"
#include "nn/layers.h"
#include "nn/norm_layers.h"
#include "nn/sequential.h"
#include "ops/detail/kernels.h"

namespace {

using namespace voxgrad;

View view_of(void* data, DType dtype, const int64_t* size, bool channels_last) {
  View view{.data = data, .dtype = dtype, .device = 0, .rank = 5};
  // The axes in memory, from the innermost to the outermost.
  constexpr int kContiguous[] = {4, 3, 2, 1, 0};
  constexpr int kChannelsLast[] = {1, 4, 3, 2, 0};
  int64_t stride = 1;
  for (const int axis : channels_last ? kChannelsLast : kContiguous) {
    view.size[axis] = size[axis];
    view.stride[axis] = stride;
    stride *= size[axis];
  }
  return view;
}

ConvGeometry geometry_of(const int64_t* stride, const int64_t* padding, const int64_t* dilation, int64_t groups) {
  ConvGeometry geometry;
  geometry.groups = groups;
  for (int a = 0; a < 3; ++a) {
    geometry.stride[a] = stride[a];
    geometry.padding[a] = padding[a];
    geometry.dilation[a] = dilation[a];
  }
  return geometry;
}

constexpr Device kDevice = Device::cuda();

/// Returns a contiguous f32 tensor that uses memory of the caller.
Tensor tensor_over(void* data, const Shape& shape, bool requires_grad) {
  return from_blob(data, shape, {f32, kDevice, requires_grad}, {});
}

/// The model (ConvTranspose3d without bias, ReLU, GroupNorm) and the results of its last run.
struct Model {
  nn::Sequential layers;
  Tensor x;
  Tensor output;

  void drop_results() {
    x = output = {};
    layers.zero_grad();
  }
  /// Runs the forward pass and then the backward pass from the output gradient `gradient`. If `gradient` is null, runs
  /// only the forward pass, without recording it.
  void run(void* input, const Shape& shape, void* gradient) {
    drop_results();
    const GradModeGuard recording(gradient != nullptr);
    x = tensor_over(input, shape, true);
    const Tensor y = layers(x);
    if (gradient) y.backward(tensor_over(gradient, y.shape(), false));
    output = y.detach();
  }
  /// Returns the output (0) or the gradient of the input (1), the convolution's weight (2), GroupNorm's weight (3) or
  /// GroupNorm's bias (4).
  Tensor result(size_t which) const {
    if (which == 0) return output;
    return which == 1 ? x.grad() : layers.parameters().at(which - 2).grad();
  }
};
std::unique_ptr<Model> model;

Model& get_model() {
  check(model != nullptr, "voxgrad_model", "call voxgrad_model_make first");
  return *model;
}

/// Returns the overrides that voxgrad_conv_plans() compares: each rewrite that copies tensors, each family, and each
/// compiled tile of the families with wgmma.
std::vector<cuda::ConvChoice> conv_choices(const cuda::ConvProblem& problem) {
  using enum cuda::ConvKernel;
  std::vector<cuda::ConvChoice> choices{{.copies = 1}, {.copies = 2}};
  for (const auto kernel :
       {mma_sync, multistage_wgrad, small_channel, few_inputs, few_outputs, pointwise, depthwise, fprop_dgrad, wgrad})
    choices.push_back({.kernel = kernel});
  for (const int8_t cluster : {1, 2})
    for (const auto& [copies, columns] : {std::pair<uint8_t, uint8_t>{0, 1}, {0, 2}, {3, 1}})
      for (const auto& [tile, halves, tf32, tf32x3] : cuda::kFpropDgradTiles)
        for (const int8_t k_blocks : {1, 2, 4})
          for (const int8_t pairs : {1, 2})
            choices.push_back({.kernel = fprop_dgrad,
                               .copies = copies,
                               .slide = static_cast<uint8_t>(tile.slide > 1 ? 2 : 1),
                               .columns = columns,
                               .k_blocks = k_blocks,
                               .m_tiles = static_cast<int8_t>(tile.row_tiles),
                               .pairs = pairs,
                               .cluster = cluster,
                               .width = static_cast<int16_t>(tile.columns)});
  for (const int8_t cluster : {1, 2})
    for (const cuda::WgradTile& tile : cuda::wgrad_tiles(cuda::arithmetic_of(problem)))
      choices.push_back({.kernel = wgrad,
                         .slide = static_cast<uint8_t>(tile.slide > 1 ? 2 : 1),
                         .k_blocks = static_cast<int8_t>(tile.chunk),
                         .m_tiles = static_cast<int8_t>(tile.m_tiles),
                         .cluster = cluster,
                         .width = static_cast<int16_t>(tile.columns)});
  return choices;
}

Shape shape_of(const int64_t* size) { return {size[0], size[1], size[2], size[3], size[4]}; }

}  // namespace

extern "C" {

/// Overrides the planner's choices for all later convolutions. The arguments are the members of cuda::ConvChoice.
void voxgrad_force_conv(int kernel, int unsplit, int k_blocks, int m_tiles, int pairs, int width, int slide,
                        int cluster, int copies, int columns) {
  cuda::force_conv_choice({.kernel = static_cast<cuda::ConvKernel>(kernel),
                           .copies = static_cast<uint8_t>(copies & 3),
                           .unsplit = unsplit != 0,
                           .slide = static_cast<uint8_t>(slide & 3),
                           .columns = static_cast<uint8_t>(columns & 3),
                           .k_blocks = static_cast<int8_t>(k_blocks),
                           .m_tiles = static_cast<int8_t>(m_tiles),
                           .pairs = static_cast<int8_t>(pairs),
                           .cluster = static_cast<int8_t>(cluster),
                           .width = static_cast<int16_t>(width)});
}

/// Runs one pass of a convolution or a transposed convolution x (N, Cin, ...) -> y (N, Cout, ...). The weight w has
/// PyTorch's shape: (Cout, Cin / groups, ...), or (Cin, Cout / groups, ...) if transposed. `pass` selects the result:
///   0  the forward pass: writes y, reads x and w
///   1  the data gradient: writes x, reads w and the output gradient y
///   2  the weight gradient: writes w, reads x and the output gradient y
///   3  both gradients: writes dx and dw, reads x, w and the output gradient y
/// dtype: 0 f32, 2 bf16, 3 f16. high: 1 for TF32. channels_last: 1 if all tensors are channels-last, 0 if they are
/// contiguous. Returns null on success, otherwise an error message.
const char* voxgrad_conv(int transposed, int pass, int dtype, int high, int channels_last, void* x, void* w, void* y,
                         void* dx, void* dw, const int64_t* x_size, const int64_t* w_size, const int64_t* y_size,
                         const int64_t* stride, const int64_t* padding, const int64_t* dilation, int64_t groups) {
  return run_caught([&] {
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    const auto type = static_cast<DType>(dtype);
    const ConvGeometry geometry = geometry_of(stride, padding, dilation, groups);
    const View xs = view_of(x, type, x_size, channels_last), ys = view_of(y, type, y_size, channels_last),
               ws = view_of(w, type, w_size, channels_last);
    // A transposed convolution from x to y runs the kernels of the convolution from y to x.
    const View &from = transposed ? ys : xs, &to = transposed ? xs : ys;
    const Kernels& kernel = cuda_kernels();
    if (pass == 2) return kernel.conv_backward_weight(ws, from, to, geometry);
    if (pass < 2) {
      const bool forward = (pass == 1) == (transposed != 0);
      return forward ? kernel.conv_forward(to, from, ws, nullptr, geometry)
                     : kernel.conv_backward_data(from, to, ws, nullptr, geometry);
    }
    const View dxs = view_of(dx, type, x_size, channels_last), dws = view_of(dw, type, w_size, channels_last);
    transposed ? kernel.conv_forward(dxs, ys, ws, nullptr, geometry)
               : kernel.conv_backward_data(dxs, ys, ws, nullptr, geometry);
    kernel.conv_backward_weight(dws, from, to, geometry);
  });
}

/// Calls `add` with the planner's choice for a pass (0, 1 or 2) of a convolution, and then with each different plan
/// that an override can select: the arguments of voxgrad_force_conv(), the clocks that the cost model estimates,
/// and a description. For the other arguments and the result, see voxgrad_conv().
const char* voxgrad_conv_plans(int transposed, int pass, int dtype, int high, int channels_last, const int64_t* x_size,
                               const int64_t* w_size, const int64_t* y_size, const int64_t* stride,
                               const int64_t* padding, const int64_t* dilation, int64_t groups,
                               void (*add)(const int* choice, double clocks, const char* description)) {
  return run_caught([&] {
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    const auto type = static_cast<DType>(dtype);
    const View xs = view_of(nullptr, type, x_size, channels_last), ys = view_of(nullptr, type, y_size, channels_last),
               ws = view_of(nullptr, type, w_size, channels_last);
    const View &from = transposed ? ys : xs, &to = transposed ? xs : ys;
    const bool dgrad = pass == (transposed ? 0 : 1);
    const ConvPass kind = pass == 2 ? ConvPass::wgrad : dgrad ? ConvPass::dgrad : ConvPass::fprop;
    auto problem = cuda::conv_problem(kind, dgrad ? to : from, dgrad ? from : to, ws,
                                      geometry_of(stride, padding, dilation, groups));
    const auto add_plan = [&](const cuda::ConvChoice& choice, const std::string& description) {
      const std::array<int, 10> members{static_cast<int>(choice.kernel),
                                        choice.unsplit,
                                        choice.k_blocks,
                                        choice.m_tiles,
                                        choice.pairs,
                                        choice.width,
                                        choice.slide,
                                        choice.cluster,
                                        choice.copies,
                                        choice.columns};
      add(members.data(), cuda::choose(problem)->cycles, description.c_str());
    };
    problem.choice = {};
    add_plan({}, cuda::explain(problem).plan);
    std::set<std::string> known;
    for (const cuda::ConvChoice& choice : conv_choices(problem)) {
      problem.choice = choice;
      const auto plan = cuda::choose(problem);
      // If no plan conforms to an override, choose() ignores it.
      if (plan->problem.choice.kernel != choice.kernel || ((choice.copies == 1 || choice.copies == 2) && !plan->copies))
        continue;
      if (const auto [text, is_new] = known.insert(cuda::explain(problem).plan); is_new) add_plan(choice, *text);
    }
  });
}

// The functions below return null on success, otherwise an error message. Tensors are contiguous f32 in GPU memory; x
// and the output gradient g have five axes.

/// Creates the model, which computes in TF32. The model uses the caller's memory for its parameters: the convolution's
/// weight (Cin, Cout, kernel, kernel, kernel), GroupNorm's weight (Cout) and GroupNorm's bias (Cout).
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

/// Runs the forward pass and, unless g is null, the backward pass from the output gradient g.
const char* voxgrad_model_run(void* x, const int64_t* x_size, void* g) {
  return run_caught([&] { get_model().run(x, shape_of(x_size), g); });
}

/// Calls voxgrad_model_run(x, x_size, g). Stores the peak memory of the run in `bytes`, without the memory that was in
/// use before the run.
const char* voxgrad_model_peak(void* x, const int64_t* x_size, void* g, int64_t* bytes) {
  return run_caught([&] {
    get_model().drop_results();
    memory::reset_peak(kDevice);
    const int64_t before = memory::stats(kDevice).current;
    model->run(x, shape_of(x_size), g);
    *bytes = memory::stats(kDevice).peak - before;
  });
}

/// Copies a result of the last run to `to`, which must have the size of the result. For `which`, see Model::result.
const char* voxgrad_model_result(int which, void* to) {
  return run_caught([&] {
    const Tensor result = get_model().result(static_cast<size_t>(which));
    tensor_over(to, result.shape(), false).copy_(result);
  });
}
}
