// Methods of Tensor that call operators.
#include "core/profiler.h"
#include "ops/detail/common.h"
#include "ops/sort.h"

namespace voxgrad {
namespace {

/// Returns a copy with the given strides. Autograd records the copy.
Tensor copy_strided(const char* op, const Tensor& x, const Strides& strides) {
  Tensor out = empty_strided(x.shape(), strides, x.options());
  kernels(x.device()).copy(out.view_out(), x.view_in());
  return record(op, out, {x}, [](const Tensor& g) { return Tensors{g}; });
}

void check_broadcasts(const char* op, const Tensor& source, const Tensor& target) {
  check(broadcast_shapes(source.shape(), target.shape(), op) == target.shape(), op, "shape ", source.shape(),
        " does not broadcast to ", target.shape());
}

/// Returns the range of addresses [begin, end) that the elements of a view occupy.
std::pair<uintptr_t, uintptr_t> bytes_of(const View& view) {
  auto begin = reinterpret_cast<uintptr_t>(view.data), end = begin;
  if (view.numel() == 0) return {begin, end};
  const int64_t item = item_size(view.dtype);
  for (int i = 0; i < view.rank; ++i)
    (view.stride[i] < 0 ? begin : end) += static_cast<uintptr_t>((view.size[i] - 1) * view.stride[i] * item);
  return {begin, end + static_cast<uintptr_t>(item)};
}

/// Returns true if the address ranges of two tensors on the same device overlap, so that a write to one tensor can
/// change the other. Compares addresses, because two storages can refer to the same memory (from_blob).
bool may_share_memory(const Tensor& a, const Tensor& b) {
  const auto [a_begin, a_end] = bytes_of(a.view_in());
  const auto [b_begin, b_end] = bytes_of(b.view_in());
  return a_begin < b_end && b_begin < a_end;
}

/// Copies x to another device. If x is not dense, first makes a dense copy of x.
Tensor transfer(const Tensor& x, Device device) {
  runtime(device).require(device.index);
  const Tensor dense = empty_like_strides(x) == x.strides() ? x : x.contiguous();
  Tensor out = empty_strided(dense.shape(), dense.strides(), {x.dtype(), device});
  const auto bytes = static_cast<size_t>(x.numel() * item_size(x.dtype()));
  if (bytes > 0) copy_bytes(out.mutable_raw_data(), device, dense.raw_data(), x.device(), bytes);
  return record("to", out, {x}, [from = x.device()](const Tensor& g) { return Tensors{g.to(from)}; });
}

}  // namespace

Tensor Tensor::clone() const {
  check_defined("clone", "the tensor", *this);
  return copy_strided("clone", *this, empty_like_strides(*this));
}

Tensor Tensor::contiguous(MemoryFormat format) const {
  // A tensor with one channel can be contiguous in both memory formats. The function then changes only the strides.
  const bool has_format = is_contiguous(format);
  if (has_format && (dim() < 3 || size(1) != 1 || suggest_memory_format() == format)) return *this;
  const bool last = format == MemoryFormat::channels_last;
  const Strides target = last ? channels_last_strides(shape()) : contiguous_strides(shape());
  if (strides() == target) return *this;
  if (has_format)
    return record("contiguous", as_strided(*this, shape(), target, storage_offset()), {*this},
                  [](const Tensor& g) { return Tensors{g}; });
  const profiler::Scope scope(profiler::Kind::layout_copy, [&] {
    const auto node = grad_fn();
    return concat(describe(*this), last ? " to channels_last" : " to contiguous",
                  node ? ", made by '" + node->name + "'" : "");
  });
  return copy_strided("contiguous", *this, target);
}

Tensor Tensor::to(Device target) const {
  check_defined("to", "the tensor", *this);
  return target == device() ? *this : transfer(*this, target);
}

Tensor Tensor::to(DType target) const {
  check_defined("to", "the tensor", *this);
  if (target == dtype()) return *this;
  Tensor out = empty_strided(shape(), empty_like_strides(*this), {target, device()});
  kernels(device()).copy(out.view_out(), view_in());
  if (!is_floating(target)) return out;
  return record("to", out, {*this}, [from = dtype()](const Tensor& g) { return Tensors{g.to(from)}; });
}

Tensor Tensor::to(Device target, DType type) const {
  // Convert before or after the transfer, whichever transfers fewer bytes.
  return item_size(type) < item_size(dtype()) ? to(type).to(target) : to(target).to(type);
}

Tensor Tensor::reshape(const Shape& target) const { return voxgrad::reshape(*this, target); }
Tensor Tensor::view(const Shape& target) const { return voxgrad::view(*this, target); }
Tensor Tensor::permute(const Dims& order) const { return voxgrad::permute(*this, order); }
Tensor Tensor::transpose(int64_t a, int64_t b) const { return voxgrad::transpose(*this, a, b); }
Tensor Tensor::squeeze(int64_t axis) const { return voxgrad::squeeze(*this, axis); }
Tensor Tensor::unsqueeze(int64_t axis) const { return voxgrad::unsqueeze(*this, axis); }
Tensor Tensor::expand(const Shape& target) const { return voxgrad::expand(*this, target); }
Tensor Tensor::narrow(int64_t axis, int64_t start, int64_t length) const {
  return voxgrad::narrow(*this, axis, start, length);
}
Tensor Tensor::slice(int64_t axis, int64_t start, int64_t stop, int64_t step) const {
  return voxgrad::slice(*this, axis, start, stop, step);
}
Tensor Tensor::select(int64_t axis, int64_t index) const { return voxgrad::select(*this, axis, index); }
Tensor Tensor::flatten(int64_t start_axis, int64_t end_axis) const {
  return voxgrad::flatten(*this, start_axis, end_axis);
}
Tensor Tensor::add(const Tensor& other) const { return voxgrad::add(*this, other); }
Tensor Tensor::sum(const Axes& axes, bool keepdim) const { return voxgrad::sum(*this, axes, keepdim); }
Tensor Tensor::mean(const Axes& axes, bool keepdim) const { return voxgrad::mean(*this, axes, keepdim); }
Tensor Tensor::amax(const Axes& axes, bool keepdim) const { return voxgrad::amax(*this, axes, keepdim); }
Tensor Tensor::amin(const Axes& axes, bool keepdim) const { return voxgrad::amin(*this, axes, keepdim); }
Tensor Tensor::var(const Axes& axes, int64_t correction, bool keepdim) const {
  return voxgrad::var(*this, axes, correction, keepdim);
}
Tensor Tensor::std(const Axes& axes, int64_t correction, bool keepdim) const {
  return voxgrad::std(*this, axes, correction, keepdim);
}
Tensor Tensor::prod(const Axes& axes, bool keepdim) const { return voxgrad::prod(*this, axes, keepdim); }
Tensor Tensor::norm(double p, const Axes& axes, bool keepdim) const { return voxgrad::norm(*this, p, axes, keepdim); }
Tensor Tensor::logsumexp(const Axes& axes, bool keepdim) const { return voxgrad::logsumexp(*this, axes, keepdim); }
Tensor Tensor::cumsum(int64_t axis) const { return voxgrad::cumsum(*this, axis); }
Tensor Tensor::softmax(int64_t axis) const { return voxgrad::softmax(*this, axis); }
Tensor Tensor::log_softmax(int64_t axis) const { return voxgrad::log_softmax(*this, axis); }
Tensor Tensor::argmax(std::optional<int64_t> axis, bool keepdim) const { return voxgrad::argmax(*this, axis, keepdim); }
Tensor Tensor::argmin(std::optional<int64_t> axis, bool keepdim) const { return voxgrad::argmin(*this, axis, keepdim); }
Selection Tensor::max(int64_t axis, bool keepdim) const { return voxgrad::max(*this, axis, keepdim); }
Selection Tensor::min(int64_t axis, bool keepdim) const { return voxgrad::min(*this, axis, keepdim); }
Selection Tensor::sort(int64_t axis, bool descending) const { return voxgrad::sort(*this, axis, descending); }
Selection Tensor::topk(int64_t k, int64_t axis, bool largest) const { return voxgrad::topk(*this, k, axis, largest); }
Tensors Tensor::split(int64_t size, int64_t axis) const { return voxgrad::split(*this, size, axis); }
Tensors Tensor::split(const std::vector<int64_t>& sizes, int64_t axis) const {
  return voxgrad::split(*this, sizes, axis);
}
Tensors Tensor::chunk(int64_t count, int64_t axis) const { return voxgrad::chunk(*this, count, axis); }

const Tensor& Tensor::copy_(const Tensor& source) const {
  check_in_place("copy_", *this, source);
  check_defined("copy_", "the source", source);
  check_broadcasts("copy_", source, *this);
  NoGradGuard no_grad;
  const Tensor local = voxgrad::expand(source.to(device()), shape());
  // Clone a source that overlaps the target, so that it is read completely before the write.
  kernels(device()).copy(view_out(), (may_share_memory(local, *this) ? local.clone() : local).view_in());
  return *this;
}

const Tensor& Tensor::fill_(double value) const {
  check_in_place("fill_", *this);
  check_fits("fill_", value, dtype());
  kernels(device()).fill(view_out(), value);
  return *this;
}

const Tensor& Tensor::zero_() const {
  check_in_place("zero_", *this);
  return fill_(0);
}

const Tensor& Tensor::add_(const Tensor& other, double alpha) const {
  check_in_place("add_", *this, other);
  check_defined("add_", "the other tensor", other);
  check_same_kind("add_", {{"the target", *this}, {"the other tensor", other}});
  check_constants("add_", *this, {alpha});
  check_broadcasts("add_", other, *this);
  NoGradGuard no_grad;
  Tensor term = voxgrad::expand(alpha == 1 ? other : affine(other, alpha, 0), shape());
  const bool same_view = term.raw_data() == raw_data() && term.strides() == strides();
  if (!same_view && may_share_memory(term, *this)) term = term.clone();  // as in copy_
  kernels(device()).binary(BinaryOp::add, view_out(), view_in(), term.view_in(), 0, 0);
  return *this;
}

const Tensor& Tensor::mul_(double factor) const {
  check_in_place("mul_", *this);
  check_constants("mul_", *this, {factor});
  kernels(device()).unary(UnaryOp::affine, view_out(), view_in(), factor, 0);
  return *this;
}

}  // namespace voxgrad
