// Implements the C interface: converts layouts to views, checks the views, and calls the kernels of their device.
#include "voxgrad_c.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/precision.h"
#include "core/storage.h"
#include "core/thread_pool.h"
#include "cuda/cuda.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"

namespace {
namespace vg = voxgrad;

std::string& last_error() {
  thread_local std::string message;
  return message;
}

/// Calls f and converts exceptions to error codes.
template <class F>
int guarded(F&& f) noexcept {
  const auto failed = [](int code, const char* what) noexcept {
    try {
      last_error() = what;
    } catch (const std::bad_alloc&) {
      last_error().clear();
    }
    return code;
  };
  try {
    f();
    return VOXGRAD_OK;
  } catch (const vg::OutOfMemoryError& e) {
    return failed(VOXGRAD_OUT_OF_MEMORY, e.what());
  } catch (const std::bad_alloc& e) {
    return failed(VOXGRAD_OUT_OF_MEMORY, e.what());
  } catch (const std::exception& e) {
    return failed(VOXGRAD_INVALID, e.what());
  }
}

/// A tensor argument: its layout and its address.
struct Argument {
  const char* name;
  const voxgrad_layout* layout;
  const void* data;
};

/// Converts an argument to a view. Throws Error if the layout is invalid.
vg::View view_of(const char* op, const Argument& argument) {
  const auto& [name, layout, data] = argument;
  vg::check(layout != nullptr, op, name, " has no layout");
  constexpr vg::DType kDTypes[] = {vg::DType::f32, vg::DType::f64, vg::DType::bf16, vg::DType::f16};
  vg::check(layout->dtype >= 0 && layout->dtype < 4, op, name, " has the unknown dtype ", layout->dtype);
  vg::check(layout->rank == 1 || layout->rank == 5, op, name, " must have 1 or 5 axes, got ", layout->rank);
  vg::View view{.data = const_cast<void*>(data),
                .dtype = kDTypes[layout->dtype],
                .device = layout->device < 0 ? -1 : layout->device,
                .rank = layout->rank};
  for (int i = 0; i < view.rank; ++i) {
    vg::check(layout->size[i] >= 0, op, name, " has size ", layout->size[i], " along axis ", i);
    view.size[i] = layout->size[i];
    view.stride[i] = layout->stride[i];
  }
  vg::check(data != nullptr || view.numel() == 0, op, name, " has no data");
  return view;
}

/// Returns the size of a view for an error message: "[2, 32, 8, 8, 8]".
std::string size_text(const vg::View& view) {
  std::string text;
  for (int i = 0; i < view.rank; ++i) text += (i > 0 ? ", " : "[") + std::to_string(view.size[i]);
  return text + "]";
}

/// Applies a context. The stream and the allocator apply to this thread during the lifetime of the object. The number
/// of CPU threads and the float32 precision stay set afterwards.
class Scope {
 public:
  Scope(const char* op, const voxgrad_context* context, int device) {
    vg::check(context != nullptr, op, "context is NULL");
    if (device < 0) {
      if (context->threads > 0 && context->threads != vg::num_threads()) vg::set_num_threads(context->threads);
      return;
    }
    vg::set_float32_precision(context->tf32 ? vg::Float32Precision::high : vg::Float32Precision::highest);
    stream_.emplace(device, context->stream);
    if (context->allocate == nullptr) return;
    allocator_ = {
        [context](size_t bytes, int index, void* stream) {
          return context->allocate(context->user, bytes, index, stream);
        },
        [context](void* data, int index, void* stream) { context->deallocate(context->user, data, index, stream); }};
    allocator_guard_.emplace(allocator_);
  }

 private:
  vg::cuda::ExternalAllocator allocator_;
  std::optional<vg::cuda::StreamGuard> stream_;
  std::optional<vg::cuda::AllocatorGuard> allocator_guard_;
};

vg::Device device_of(const vg::View& view) {
  return view.device < 0 ? vg::Device::cpu() : vg::Device::cuda(view.device);
}

/// The checked operands of a convolution.
struct Operands {
  vg::View x;
  vg::View weight;
  vg::View y;
  std::optional<vg::View> bias;
  vg::ConvGeometry geometry;

  vg::ConvEpilogue epilogue() const { return bias ? &*bias : nullptr; }
};

void check_same_kind(const char* op, const Argument& argument, const vg::View& view, const vg::View& x) {
  vg::check(view.dtype == x.dtype && view.device == x.device, op, argument.name, " is ", view.dtype, " on ",
            device_of(view), ", x is ", x.dtype, " on ", device_of(x));
}

vg::ConvGeometry geometry_of(const char* op, const voxgrad_conv* conv) {
  vg::check(conv != nullptr, op, "conv is NULL");
  vg::check(conv->groups > 0, op, "groups must be positive, got ", conv->groups);
  vg::ConvGeometry geometry;
  geometry.groups = conv->groups;
  constexpr int64_t kMax = int64_t{1} << 31;
  for (int i = 0; i < 3; ++i) {
    const int64_t stride = conv->stride[i], padding = conv->padding[i], dilation = conv->dilation[i];
    vg::check(stride >= 1 && stride < kMax && dilation >= 1 && dilation < kMax && padding >= 0 && padding < kMax, op,
              "stride ", stride, ", padding ", padding, " or dilation ", dilation, " of axis ", i, " is out of range");
    geometry.stride[i] = stride;
    geometry.padding[i] = padding;
    geometry.dilation[i] = dilation;
  }
  return geometry;
}

/// Checks the operands of a convolution from x to y or, if `transposed` is true, of a transposed convolution from y to
/// x. Unless the address of `bias` is null, `bias` must have one element per channel of the result.
Operands operands_of(const char* op, const voxgrad_conv* conv, const Argument& x, const Argument& weight,
                     const Argument& y, const Argument& bias, bool transposed) {
  Operands o{view_of(op, x), view_of(op, weight), view_of(op, y), {}, geometry_of(op, conv)};
  const auto shapes = [&] {
    return " (x " + size_text(o.x) + ", weight " + size_text(o.weight) + ", y " + size_text(o.y) + ", groups " +
           std::to_string(o.geometry.groups) + ")";
  };
  vg::check(o.x.rank == 5 && o.weight.rank == 5 && o.y.rank == 5, op, "operands must have 5 axes", shapes());
  check_same_kind(op, weight, o.weight, o.x);
  check_same_kind(op, y, o.y, o.x);
  const int64_t groups = o.geometry.groups;
  const auto divides = [&](int64_t channels) { return channels > 0 && channels % groups == 0; };
  vg::check(o.x.size[0] == o.y.size[0] && divides(o.x.size[1]) && divides(o.y.size[1]) &&
                o.weight.size[0] == o.y.size[1] && o.weight.size[1] == o.x.size[1] / groups,
            op, "batch, channels and groups do not match", shapes());
  for (int i = 0; i < 3; ++i) {
    const int64_t in = o.x.size[i + 2], kernel = o.weight.size[i + 2];
    vg::check(in > 0 && kernel > 0, op, "an axis other than the batch is empty", shapes());
    const int64_t largest =
        vg::conv_output_size(in, kernel, o.geometry.stride[i], o.geometry.padding[i], o.geometry.dilation[i]);
    vg::check(o.y.size[i + 2] >= 1 && o.y.size[i + 2] <= largest, op, "y must have 1 to ", largest,
              " elements along axis ", i + 2, shapes());
  }
  if (bias.data == nullptr) return o;
  o.bias = view_of(op, bias);
  check_same_kind(op, bias, *o.bias, o.x);
  const int64_t channels = transposed ? o.x.size[1] : o.y.size[1];
  vg::check(o.bias->rank == 1 && o.bias->size[0] == channels, op, "bias must have size [", channels, "], got ",
            size_text(*o.bias));
  return o;
}

// ---- normalization

/// Joins D, H and W of a tensor (N, C, D, H, W) to one axis L. Returns null if the positions have no common stride. An
/// axis with one element gets the stride that it has in a contiguous tensor.
std::optional<vg::View> rows_of(const vg::View& view) {
  vg::View rows = view;
  rows.rank = 3;
  rows.size[2] = rows.stride[2] = 1;
  for (int axis = 4; axis >= 2; --axis) {
    if (view.size[axis] == 1) continue;
    if (rows.size[2] == 1) rows.stride[2] = view.stride[axis];
    if (view.numel() > 0 && view.stride[axis] != rows.stride[2] * rows.size[2]) return std::nullopt;
    rows.size[2] *= view.size[axis];
  }
  if (rows.size[1] == 1) rows.stride[1] = rows.size[2];
  if (rows.size[0] == 1) rows.stride[0] = rows.size[1] * rows.size[2];
  return rows;
}

/// Returns the view (N, C, L) of x. Throws Error unless x is contiguous or channels-last.
vg::View dense_rows_of(const char* op, const vg::View& x) {
  const auto rows = rows_of(x);
  const auto has_strides = [&](int64_t channel, int64_t position) {
    return rows->stride[0] == rows->size[1] * rows->size[2] && rows->stride[1] == channel &&
           rows->stride[2] == position;
  };
  vg::check(x.numel() == 0 || (rows && (has_strides(rows->size[2], 1) || has_strides(1, rows->size[1]))), op,
            "x must be contiguous or channels-last, size ", size_text(x));
  return *rows;
}

vg::View at(vg::View view, const void* data) {
  view.data = const_cast<void*>(data);
  return view;
}

vg::ActivationArguments activation_of(const char* op, int32_t kind, double slope) {
  vg::check(kind >= VOXGRAD_NONE && kind <= VOXGRAD_SILU, op, "the activation ", kind, " is unknown");
  return {static_cast<vg::ActivationKind>(kind), slope};
}

/// The checked operands of a normalization.
struct NormOperands {
  vg::View x;           // (N, C, L)
  vg::View statistics;  // (N, groups, 2)
  std::optional<vg::View> weight;
  std::optional<vg::View> bias;
  vg::NormActivations activations;
};

std::optional<vg::View> channel_vector(const char* op, const Argument& argument, const vg::View& x) {
  if (argument.data == nullptr) return std::nullopt;
  const vg::View view = view_of(op, argument);
  const bool half = x.dtype == vg::DType::bf16 || x.dtype == vg::DType::f16;
  vg::check(view.dtype == x.dtype || (half && view.dtype == vg::DType::f32), op, argument.name, " is ", view.dtype,
            ", x is ", x.dtype);
  vg::check(view.rank == 1 && view.size[0] == x.size[1] && view.device == x.device, op, argument.name,
            " must have size [", x.size[1], "] and be on the device of x, got ", size_text(view), " on ",
            device_of(view));
  return view;
}

NormOperands norm_operands(const char* op, const voxgrad_norm* norm, const voxgrad_layout* layout, const void* x,
                           const double* statistics, const Argument& weight, const Argument& bias) {
  vg::check(norm != nullptr, op, "norm is NULL");
  const vg::View view = view_of(op, {"x", layout, x});
  vg::check(view.rank == 5, op, "x must have 5 axes, got ", view.rank);
  const int64_t groups = norm->groups;
  vg::check(groups > 0 && view.size[1] > 0 && view.size[1] % groups == 0, op, "groups ", groups,
            " does not divide the channels of x ", size_text(view));
  vg::check(norm->eps >= 0, op, "eps must not be negative, got ", norm->eps);
  vg::check(statistics != nullptr || view.size[0] == 0, op, "statistics has no data");
  vg::View pairs{.data = const_cast<double*>(statistics), .dtype = vg::DType::f64, .device = view.device, .rank = 3};
  const int64_t size[] = {view.size[0], groups, 2}, stride[] = {2 * groups, 2, 1};
  for (int i = 0; i < 3; ++i) {
    pairs.size[i] = size[i];
    pairs.stride[i] = stride[i];
  }
  const vg::View rows = dense_rows_of(op, view);
  return {rows,
          pairs,
          channel_vector(op, weight, rows),
          channel_vector(op, bias, rows),
          {activation_of(op, norm->before, norm->before_slope), activation_of(op, norm->after, norm->after_slope)}};
}

/// The gradient dy of the result of a normalization.
struct Gradient {
  std::optional<vg::Storage> copy;
  vg::View view;  ///< (N, C, L)

  /// Stores a view of dy. If the elements that are adjacent in x are not adjacent in dy, first copies dy to the strides
  /// of x, because the kernel reads adjacent elements as vectors.
  Gradient(const char* op, const Argument& dy, const Argument& x, const vg::View& x_rows) : view(x_rows) {
    const vg::View from = view_of(op, dy), like = view_of(op, x);
    check_same_kind(op, dy, from, like);
    vg::check(from.rank == like.rank && std::equal(from.size, from.size + from.rank, like.size), op,
              "dy must have the size of x");
    const auto rows = rows_of(from);
    if (rows && rows->stride[x_rows.stride[2] == 1 ? 2 : 1] == 1) {
      view = *rows;
      return;
    }
    copy.emplace(static_cast<size_t>(from.numel()) * static_cast<size_t>(vg::item_size(from.dtype)), device_of(from));
    view.data = copy->data();
    vg::kernels(device_of(from)).copy(at(like, view.data), from);
  }
};

const vg::View* pointer(const std::optional<vg::View>& view) { return view ? &*view : nullptr; }

}  // namespace

int voxgrad_conv_forward(const voxgrad_context* context, const voxgrad_conv* conv, const voxgrad_layout* y_layout,
                         void* y, const voxgrad_layout* x_layout, const void* x, const voxgrad_layout* weight_layout,
                         const void* weight, const voxgrad_layout* bias_layout, const void* bias) {
  return guarded([&] {
    constexpr const char* kOp = "conv_forward";
    const Operands o = operands_of(kOp, conv, {"x", x_layout, x}, {"weight", weight_layout, weight}, {"y", y_layout, y},
                                   {"bias", bias_layout, bias}, false);
    const Scope scope(kOp, context, o.x.device);
    vg::kernels(device_of(o.x)).conv_forward(o.y, o.x, o.weight, o.epilogue(), o.geometry);
  });
}

int voxgrad_conv_transpose(const voxgrad_context* context, const voxgrad_conv* conv, const voxgrad_layout* x_layout,
                           void* x, const voxgrad_layout* y_layout, const void* y, const voxgrad_layout* weight_layout,
                           const void* weight, const voxgrad_layout* bias_layout, const void* bias) {
  return guarded([&] {
    constexpr const char* kOp = "conv_transpose";
    const Operands o = operands_of(kOp, conv, {"x", x_layout, x}, {"weight", weight_layout, weight}, {"y", y_layout, y},
                                   {"bias", bias_layout, bias}, true);
    const Scope scope(kOp, context, o.x.device);
    vg::kernels(device_of(o.x)).conv_backward_data(o.x, o.y, o.weight, o.epilogue(), o.geometry);
  });
}

int voxgrad_conv_weight(const voxgrad_context* context, const voxgrad_conv* conv, const voxgrad_layout* weight_layout,
                        void* weight, const voxgrad_layout* x_layout, const void* x, const voxgrad_layout* y_layout,
                        const void* y) {
  return guarded([&] {
    constexpr const char* kOp = "conv_weight";
    const Operands o = operands_of(kOp, conv, {"x", x_layout, x}, {"weight", weight_layout, weight}, {"y", y_layout, y},
                                   {"bias", nullptr, nullptr}, false);
    const Scope scope(kOp, context, o.x.device);
    vg::kernels(device_of(o.x)).conv_backward_weight(o.weight, o.x, o.y, o.geometry);
  });
}

int voxgrad_conv_bias(const voxgrad_context* context, const voxgrad_layout* bias_layout, void* bias,
                      const voxgrad_layout* y_layout, const void* y) {
  return guarded([&] {
    constexpr const char* kOp = "conv_bias";
    const Argument bias_argument{"bias", bias_layout, bias};
    const vg::View in = view_of(kOp, {"y", y_layout, y});
    vg::View out = view_of(kOp, bias_argument);
    vg::check(in.rank == 5 && out.rank == 1 && out.size[0] == in.size[1], kOp, "bias ", size_text(out),
              " does not match y ", size_text(in));
    check_same_kind(kOp, bias_argument, out, in);
    const int64_t channels = out.size[0], stride = out.stride[0];
    out.rank = 5;
    for (int i = 0; i < 5; ++i) {
      out.size[i] = i == 1 ? channels : 1;
      out.stride[i] = i == 1 ? stride : channels;
    }
    const Scope scope(kOp, context, in.device);
    vg::kernels(device_of(in)).reduce(vg::ReduceOp::sum, out, in);
  });
}

int voxgrad_norm_forward(const voxgrad_context* context, const voxgrad_norm* norm, const voxgrad_layout* layout,
                         void* y, const void* x, double* statistics, const voxgrad_layout* weight_layout,
                         const void* weight, const voxgrad_layout* bias_layout, const void* bias) {
  return guarded([&] {
    constexpr const char* kOp = "norm_forward";
    const NormOperands o =
        norm_operands(kOp, norm, layout, x, statistics, {"weight", weight_layout, weight}, {"bias", bias_layout, bias});
    const Scope scope(kOp, context, o.x.device);
    vg::kernels(device_of(o.x))
        .group_norm(at(o.x, y), o.statistics, o.x, pointer(o.weight), pointer(o.bias), nullptr, norm->eps,
                    o.activations, nullptr);
  });
}

int voxgrad_norm_backward(const voxgrad_context* context, const voxgrad_norm* norm, const voxgrad_layout* layout,
                          void* dx, void* dweight, void* dbias, void* dadded, const voxgrad_layout* dy_layout,
                          const void* dy, const void* x, const double* statistics, const voxgrad_layout* weight_layout,
                          const void* weight, const voxgrad_layout* bias_layout, const void* bias) {
  return guarded([&] {
    constexpr const char* kOp = "norm_backward";
    const NormOperands o =
        norm_operands(kOp, norm, layout, x, statistics, {"weight", weight_layout, weight}, {"bias", bias_layout, bias});
    const Scope scope(kOp, context, o.x.device);
    const Gradient dy_rows(kOp, {"dy", dy_layout, dy}, {"x", layout, x}, o.x);
    // The kernel needs memory for the means of each group.
    const vg::Storage means(static_cast<size_t>(o.statistics.numel()) * sizeof(double), device_of(o.x));
    const auto gradient = [&](void* data, const std::optional<vg::View>& like) {
      return data == nullptr || !like ? std::nullopt : std::optional(at(*like, data));
    };
    const auto dgamma = gradient(dweight, o.weight), dbeta = gradient(dbias, o.bias);
    vg::View sums{.data = dadded,
                  .dtype = o.x.dtype == vg::DType::f64 ? vg::DType::f64 : vg::DType::f32,
                  .device = o.x.device,
                  .rank = 1};
    sums.size[0] = o.x.size[1];
    sums.stride[0] = 1;
    vg::kernels(device_of(o.x))
        .group_norm_backward({at(o.x, dx), pointer(dgamma), pointer(dbeta), dadded ? &sums : nullptr},
                             at(o.statistics, means.data()), dy_rows.view, o.x, o.statistics, pointer(o.weight),
                             pointer(o.bias), o.activations, nullptr);
  });
}

const char* voxgrad_error(void) { return last_error().c_str(); }
const char* voxgrad_version(void) { return VOXGRAD_C_RELEASE; }
int voxgrad_c_version(void) { return VOXGRAD_C_VERSION; }

int voxgrad_has_cuda(void) {
#ifdef VOXGRAD_C_CUDA
  return 1;
#else
  return 0;
#endif
}

int voxgrad_supports_cpu(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") ? 1 : 0;
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
#else
  return 1;
#endif
}
