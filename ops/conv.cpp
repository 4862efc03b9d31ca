// Convolutions over one, two and three spatial axes.
//
// The public functions call the three maps of ops/detail/unrecorded.h. Each map computes a tensor (N, C, D, H, W) from
// two tensors. The maps are the convolution, the gradient of its input (the transposed convolution) and the gradient of
// its weight. The gradients of each map are the other two maps, so every map can be differentiated any number of times.
// The size of the result is an argument of each map, because several input sizes lead to the same output size if the
// stride is above 1. Signals and images are computed as volumes with leading spatial axes of size 1.
#include "ops/conv.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "ops/detail/conv_geometry.h"
#include "ops/detail/unrecorded.h"

namespace voxgrad {

Tensor convolve(bool transposed, const Tensor& in, const Tensor& weight, const Tensor& bias, const Triple& size,
                const ConvGeometry& geometry, FusedEpilogue epilogue) {
  const bool dx = needs_gradient(in), dw = needs_gradient(weight), db = epilogue.bias_recorded && needs_gradient(bias);
  // Save the operands before the kernel runs: autograd::recompute() then omits it if this is its last operation.
  const Saved in_saved = saved_if(dw, in), w_saved = saved_if(dx, weight);
  const Tensor& appended = epilogue.appended;
  const int64_t channels = transposed ? weight.size(1) * geometry.groups : weight.size(0),
                more = appended.defined() ? appended.size(1) : 0;
  const bool joins = appended.defined();
  // As in PyTorch, the result is channels-last if at least one operand is channels-last.
  const MemoryFormat format = std::max(in.suggest_memory_format(), weight.suggest_memory_format());
  const Tensor out = empty({in.size(0), channels + more, size[0], size[1], size[2]}, in.options(), format);
  const Kernels& k = kernels(in.device());
  (transposed ? k.conv_backward_data : k.conv_forward)((joins ? narrow(out, 1, 0, channels) : out).view_out(),
                                                       in.view_in(), weight.view_in(),
                                                       {OptionalView(bias), epilogue.relu}, geometry);
  if (joins) narrow(out, 1, channels, more).copy_(appended.detach());
  return record(
      transposed ? "conv_transpose" : "conv", out, {in, weight, epilogue.bias_recorded ? bias : Tensor(), appended},
      [=, in_size = spatial_size(in), w_form = form_of(weight)](const Tensor& grad) {
        const Tensor g = joins ? narrow(grad, 1, 0, channels) : grad;
        return Tensors{dx ? convolve(!transposed, g, w_saved(), {}, in_size, geometry) : Tensor(),
                       dw ? convolve_weight(transposed, in_saved(), g, w_form, geometry) : Tensor(),
                       db ? sum(g, all_but_channels(g)) : Tensor(), joins ? narrow(grad, 1, channels, more) : Tensor()};
      });
}

Tensor convolve_weight(bool transposed, const Tensor& in, const Tensor& out_grad, const WeightForm& form,
                       const ConvGeometry& geometry) {
  const Tensor &x = transposed ? out_grad : in, &y = transposed ? in : out_grad;
  const Triple& size = form.size;
  Tensor weight = empty({y.size(1), x.size(1) / geometry.groups, size[0], size[1], size[2]}, x.options(), form.format);
  kernels(x.device()).conv_backward_weight(weight.view_out(), x.view_in(), y.view_in(), geometry);
  const bool d_in = needs_gradient(in), d_out = needs_gradient(out_grad);
  return record("conv_weight", weight, {in, out_grad},
                [=, in_saved = saved_if(d_out, in), out_saved = saved_if(d_in, out_grad), in_size = spatial_size(in),
                 out_size = spatial_size(out_grad)](const Tensor& grad) {
                  return Tensors{d_in ? convolve(!transposed, out_saved(), grad, {}, in_size, geometry) : Tensor(),
                                 d_out ? convolve(transposed, in_saved(), grad, {}, out_size, geometry) : Tensor()};
                });
}

void through_float32(
    const View& out, const View& a, const View& b, const View* bias,
    const std::function<void(const View& out, const View& a, const View& b, const View* bias)>& kernel) {
  const Kernels& k = kernels(device_of(out));
  const auto empty_float32 = [](const View& like) {
    return empty(Shape(std::span(like.size, static_cast<size_t>(like.rank))), {f32, device_of(like)});
  };
  const auto wide = [&](const View& view) {
    const Tensor copy = empty_float32(view);
    k.copy(copy.view_out(), view);
    return copy;
  };
  const Tensor result = empty_float32(out), wide_a = wide(a), wide_b = wide(b),
               wide_bias = bias ? wide(*bias) : Tensor();
  kernel(result.view_out(), wide_a.view_in(), wide_b.view_in(), OptionalView(wide_bias));
  k.copy(out, result.view_in());
}

namespace {

// ---- the options of a public function, and their checks

/// Upper limit of the size of a result along an axis.
constexpr int64_t kMaxSize = int64_t{1} << 62;

/// The options of a public function for any number of spatial axes.
struct Request {
  const char* op;
  Dims stride, padding, dilation;
  int64_t groups;
  bool transposed = false;
  Dims output_padding{};
  std::optional<Dims> output_size{};

  /// Returns the number of spatial axes.
  int64_t axes() const { return stride.size(); }
  /// Returns the channel axis of the input: 1, or 0 without a batch. The spatial axes follow the channel axis.
  int64_t channel_axis(const Tensor& input) const { return input.dim() - axes() - 1; }
};

/// Prints the shapes of both operands in an error message.
struct Operands {
  const Tensor& x;
  const Tensor& weight;
  friend std::ostream& operator<<(std::ostream& out, const Operands& o) {
    return out << " (input " << o.x.shape() << ", weight " << o.weight.shape() << ')';
  }
};

void check_options(const Request& r) {
  check(r.groups > 0, r.op, "groups must be positive, got ", r.groups);
  check_extent(r.op, "stride", r.stride, 1);
  check_extent(r.op, "dilation", r.dilation, 1);
  check_extent(r.op, "padding", r.padding, 0);
  if (!r.transposed || r.output_size) return;
  check_extent(r.op, "output_padding", r.output_padding, 0);
  for (int64_t i = 0; i < r.axes(); ++i)
    check(r.output_padding[i] < std::max(r.stride[i], r.dilation[i]), r.op,
          "output_padding must be smaller than stride or dilation, got output_padding ", r.output_padding, ", stride ",
          r.stride, ", dilation ", r.dilation);
}

int64_t output_channels(const Request& r, const Tensor& weight) {
  return r.transposed ? weight.size(1) * r.groups : weight.size(0);
}

void check_channels(const Request& r, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Operands operands{x, weight};
  const int64_t channels = x.size(r.channel_axis(x));
  const char* const hint = r.channel_axis(x) > 0 ? ""
                                                 : "; an input without a batch begins with its channels: use "
                                                   "unsqueeze(1) if the first axis is the batch";
  int64_t expected = weight.size(0);
  const bool overflow = !r.transposed && __builtin_mul_overflow(weight.size(1), r.groups, &expected);
  check(!overflow, r.op, "groups ", r.groups, " is too large", operands);
  check(expected == channels, r.op, "weight expects ", expected, expected == 1 ? " input channel" : " input channels",
        r.transposed || r.groups == 1 ? "" : " in all groups together", ", input has ", channels, operands, hint);
  check(weight.size(0) % r.groups == 0, r.op, "groups ", r.groups, " does not divide the ",
        r.transposed ? "input" : "output", " channel count ", weight.size(0), operands);
  if (!bias.defined()) return;
  check(bias.shape() == Shape{output_channels(r, weight)}, r.op, "bias must have shape [", output_channels(r, weight),
        "], got ", bias.shape(), operands);
}

void check_operands(const Request& r, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Operands operands{x, weight};
  check(x.dim() == r.axes() + 2 || x.dim() == r.axes() + 1, r.op, "input must have ", r.axes() + 2, " axes, or ",
        r.axes() + 1, " without a batch", operands);
  check_floating(r.op, x);
  check_same_kind(r.op, {{"input", x}, {"weight", weight}, {"bias", bias}});
  check(weight.dim() == r.axes() + 2, r.op, "weight must have ", r.axes() + 2, " axes", operands);
  for (int64_t size : weight.shape()) check(size > 0, r.op, "weight has an empty axis", operands);
  for (int64_t i = r.channel_axis(x); i < x.dim(); ++i)
    check(x.size(i) > 0, r.op, "input has an empty axis other than the batch", operands);
  check_channels(r, x, weight, bias);
}

/// Returns the spatial size of the result. Throws if the result is empty or too large, or if output_size is out of
/// range.
Dims result_size(const Request& r, const Tensor& x, const Tensor& weight) {
  const Operands operands{x, weight};
  Dims size;
  for (int64_t i = 0; i < r.axes(); ++i) {
    const int64_t axis = r.channel_axis(x) + 1 + i, in = x.size(axis), kernel = weight.size(i + 2);
    if (r.transposed) {
      const int64_t min_size = conv_transpose_output_size(in, kernel, r.stride[i], r.padding[i], 0, r.dilation[i]);
      check(min_size < kMaxSize, r.op, "the result would have ", min_size, " elements along axis ", axis, operands);
      size.push_back(r.output_size ? (*r.output_size)[i] : min_size + r.output_padding[i]);
      if (r.output_size)
        check(size[i] >= min_size && size[i] < min_size + r.stride[i], r.op, "output_size ", *r.output_size,
              " is out of range: axis ", axis, " allows ", min_size, " to ", min_size + r.stride[i] - 1, operands);
    } else {
      size.push_back(conv_output_size(in, kernel, r.stride[i], r.padding[i], r.dilation[i]));
    }
    check(size[i] > 0, r.op,
          r.transposed ? "" : "the dilated kernel is larger than the padded input: ", "the result would have ", size[i],
          " elements along axis ", axis, " with stride ", r.stride, ", padding ", r.padding, ", dilation ", r.dilation,
          operands);
  }
  return size;
}

/// The checked arguments of a map.
struct Call {
  Tensor x;
  Tensor weight;
  Triple size;  // spatial size of the result
  ConvGeometry geometry;
};

/// Checks all arguments and converts them to the arguments of a map.
Call make_call(const Request& r, const Tensor& input, const Tensor& weight, const Tensor& bias) {
  check_options(r);
  check_operands(r, input, weight, bias);
  const Triple size = to_triple(result_size(r, input, weight), 1);
  const Tensor x = as_volume(input, r.axes());
  // Throws if the number of elements does not fit in 64 bits.
  numel({x.size(0), output_channels(r, weight), size[0], size[1], size[2]}, r.op);
  return {x,
          as_volume(weight, r.axes()),
          size,
          {to_triple(r.stride, 1), to_triple(r.padding, 0), to_triple(r.dilation, 1), r.groups}};
}

/// Checks the arguments and computes the convolution. The result has the same number of axes as the input.
Tensor run(const Request& r, const Tensor& given_input, const Tensor& given_weight, const Tensor& given_bias,
           FusedEpilogue epilogue = {}) {
  check_defined(r.op, "input", given_input, "weight", given_weight);
  const Tensor input = autocasted(r.op, given_input), weight = autocasted(r.op, given_weight),
               bias = autocasted(r.op, given_bias);
  const Call call = make_call(r, input, weight, bias);
  distributed::Communicator* const group = r.axes() == 3 ? distributed::spatial_group() : nullptr;
  if (const Tensor& t = epilogue.appended; t.defined()) {
    const bool fits = !group && r.axes() == 3 && input.dim() == 5 && t.dim() == 5 && t.size(0) == input.size(0) &&
                      spatial_size(t) == call.size && t.dtype() == input.dtype() && t.device() == input.device();
    if (!fits)
      return cat({run(r, input, weight, bias, {epilogue.relu, epilogue.bias_recorded}), t}, r.channel_axis(input));
  }
  const Tensor y =
      group ? convolve_slab(r.op, *group, r.transposed, call.x, call.weight, bias, call.size, call.geometry, epilogue)
            : convolve(r.transposed, call.x, call.weight, bias, call.size, call.geometry, epilogue);
  return from_volume(y, r.axes(), input.dim() == r.axes() + 2);
}

// ---- explanations

/// Returns a view (N, C, D, H, W) without data.
View shape_view(const Shape& shape, const TensorOptions& options, MemoryFormat format) {
  View view{.dtype = options.dtype, .device = options.device.is_cuda() ? options.device.index : -1, .rank = 5};
  std::copy(shape.begin(), shape.end(), view.size);
  const bool last = format == MemoryFormat::channels_last;
  std::copy_n((last ? channels_last_strides(shape) : contiguous_strides(shape)).begin(), 5, view.stride);
  return view;
}

/// Formats a number with three digits and an SI prefix: "1.23 GFLOP".
std::string quantity(double value, const char* unit) {
  const char* prefix = "";
  for (const char* larger : {"k", "M", "G", "T", "P"}) {
    if (value < 1000) break;
    value /= 1000;
    prefix = larger;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.3g %s%s", value, prefix, unit);
  return text;
}

/// Formats the lower bound of the time and the limiting resource (arithmetic or memory). Returns an empty string if the
/// rates of the device are unknown.
std::string min_time_text(double flop, double bytes, const ConvExplanation& e) {
  if (e.flop_rate <= 0 || e.byte_rate <= 0) return "";
  const double compute = flop / e.flop_rate, memory = bytes / e.byte_rate;
  char text[64];
  std::snprintf(text, sizeof text, ", at least %.3g ms (%s)", std::max(compute, memory) * 1e3,
                compute > memory ? "arithmetic" : "memory");
  return text;
}

std::string explain(const Request& r, const Shape& input, const Shape& weight, const TensorOptions& options,
                    MemoryFormat format) {
  // With strides of 0, a tensor of any shape occupies the memory of one element.
  const auto placeholder = [&](const Shape& shape) {
    return empty_strided(shape, Strides::filled(shape.size(), 0), {.dtype = options.dtype});
  };
  const Call call = make_call(r, placeholder(input), placeholder(weight), {});
  const Triple& size = call.size;
  const Shape result{call.x.size(0), output_channels(r, call.weight), size[0], size[1], size[2]};
  const View in = shape_view(call.x.shape(), options, format), w = shape_view(call.weight.shape(), options, format),
             out = shape_view(result, options, format);
  // x is the input and y the result of a convolution. conv_transpose reads y and writes x.
  const View &x = r.transposed ? out : in, &y = r.transposed ? in : out;

  const ConvGeometry& g = call.geometry;
  const double flop = conv_flop(x, w, y, g);
  double bytes = 0;
  for (const View& view : {x, y, w})
    bytes += static_cast<double>(view.numel()) * static_cast<double>(item_size(options.dtype));
  std::ostringstream text;
  text << r.op << ' ' << options.dtype << " on " << options.device << ": " << call.x.shape() << ", weight "
       << call.weight.shape() << " -> " << result << "; each kernel " << quantity(flop, "FLOP") << ", "
       << quantity(bytes, "B") << '\n';
  const ConvPass forward = r.transposed ? ConvPass::dgrad : ConvPass::fprop;
  const ConvPass input_gradient = r.transposed ? ConvPass::fprop : ConvPass::dgrad;
  for (const auto& [name, pass] : {std::pair("forward", forward), std::pair("input gradient", input_gradient),
                                   std::pair("weight gradient", ConvPass::wgrad)}) {
    const ConvExplanation e = explain_conv(pass, x, w, y, g);
    text << "  " << name << ": " << e.plan << min_time_text(flop, bytes, e) << '\n';
  }
  return text.str();
}

template <class Options>
Request request(const char* op, const Options& o) {
  Request r{op, Dims(o.stride.values), Dims(o.padding.values), Dims(o.dilation.values), o.groups};
  if constexpr (requires { o.output_padding; }) {
    r.transposed = true;
    r.output_padding = Dims(o.output_padding.values);
    if (o.output_size) r.output_size = Dims(o.output_size->values);
  }
  return r;
}

}  // namespace

template <int N>
void ConvOptions<N>::validate(const char* op) const {
  check_options(request(op, *this));
}
template <int N>
void ConvTransposeOptions<N>::validate(const char* op) const {
  check_options(request(op, *this));
}

/// The name of the operator with these options. VG_DEFINE specializes the variable.
template <class Options>
static constexpr const char* kName = nullptr;

template <class Options>
Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options,
            const FusedEpilogue& epilogue) {
  return run(request(kName<Options>, options), x, weight, bias, epilogue);
}

/// Defines function() and instantiates the templates for one type of options.
#define VG_DEFINE(function, Options)                                                                       \
  template <>                                                                                              \
  constexpr const char* kName<Options> = #function;                                                        \
  template struct Options;                                                                                 \
  template Tensor conv(const Tensor&, const Tensor&, const Tensor&, const Options&, const FusedEpilogue&); \
  Tensor function(const Tensor& x, const Tensor& weight, const Tensor& bias, const Options& options) {     \
    return conv(x, weight, bias, options);                                                                 \
  }
VG_DEFINE(conv1d, ConvOptions<1>)
VG_DEFINE(conv2d, ConvOptions<2>)
VG_DEFINE(conv3d, ConvOptions<3>)
VG_DEFINE(conv_transpose1d, ConvTransposeOptions<1>)
VG_DEFINE(conv_transpose2d, ConvTransposeOptions<2>)
VG_DEFINE(conv_transpose3d, ConvTransposeOptions<3>)
#undef VG_DEFINE

std::string explain_conv3d(const Shape& x, const Shape& weight, const ConvOptions<3>& options,
                           const TensorOptions& kind, MemoryFormat format) {
  return explain(request("conv3d", options), x, weight, kind, format);
}
std::string explain_conv_transpose3d(const Shape& x, const Shape& weight, const ConvTransposeOptions<3>& options,
                                     const TensorOptions& kind, MemoryFormat format) {
  return explain(request("conv_transpose3d", options), x, weight, kind, format);
}

}  // namespace voxgrad
