// Tensor: a reference-counted handle to storage, geometry and autograd data.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "dims.h"
#include "dtype.h"
#include "storage.h"
#include "view.h"

namespace voxgrad {

class Tensor;
class Node;
struct Selection;
struct TensorBody;
/// A list of tensors.
using Tensors = std::vector<Tensor>;
/// A function that is called with a gradient. If it returns a defined tensor, that tensor replaces the gradient.
using Hook = std::function<Tensor(const Tensor& grad)>;

/// A registered hook. The hook stays registered when its handle is destroyed. A hook may call remove() during a
/// backward pass.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::weak_ptr<Hook> hook) : hook_(std::move(hook)) {}
  void remove() const {
    if (const auto hook = hook_.lock()) *hook = nullptr;
  }

 private:
  std::weak_ptr<Hook> hook_;
};

/// Dtype, device and requires_grad of a new tensor.
struct TensorOptions {
  DType dtype = DType::f32;
  Device device = Device::cpu();
  bool requires_grad = false;
};

/// The order of the axes of a dense (N, C, spatial...) tensor in memory: contiguous stores the last axis innermost,
/// channels_last stores C innermost.
enum class MemoryFormat : uint8_t { contiguous, channels_last };

/// Parameter type of the deleted assignment to temporary Tensors; see Tensor. Its name appears in the error message of
/// the compiler.
struct AssignmentToTemporaryTensor_use_copy_ {
  template <class T>
  AssignmentToTemporaryTensor_use_copy_(const T& value);
};

/// An n-dimensional array on one device. Copying a Tensor copies the handle: both handles share the elements and the
/// gradient. clone() copies the elements. A default-constructed Tensor is undefined.
///
/// Assigning to a temporary handle does not compile, because the assignment would not change any element. Instead of
/// x[0] = y or x.narrow(0, 1, 2) = y, write x[0].copy_(y).
///
/// Several threads may read a tensor at the same time, compute with it, and run backward passes that accumulate its
/// gradient (core/autograd.h). While a thread writes elements, calls requires_grad_() or set_grad(), or assigns to a
/// handle, no other thread may use that tensor or handle.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<TensorBody> body) : body_(std::move(body)) {}
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & noexcept = default;
  void operator=(const AssignmentToTemporaryTensor_use_copy_&) && = delete;  // write elements with copy_()
  ~Tensor() = default;

  // ---- geometry, dtype and device
  bool defined() const { return body_ != nullptr; }
  const Shape& shape() const;
  const Strides& strides() const;
  /// Returns the size of one axis. Negative axes count from the end.
  int64_t size(int64_t axis) const;
  int64_t dim() const { return shape().size(); }
  int64_t numel() const;
  DType dtype() const;
  Device device() const;
  TensorOptions options() const { return {dtype(), device(), false}; }
  bool is_contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  /// Returns channels_last if the tensor is not contiguous and its axes are in the order of channels_last; otherwise
  /// contiguous. A slice of a channels_last tensor also returns channels_last. If the tensor has one channel, its
  /// strides fit both formats, and the function returns the format that was passed to contiguous() or empty().
  MemoryFormat suggest_memory_format() const;
  const std::shared_ptr<Storage>& storage() const;
  /// Returns the number of elements between the start of the storage and the first element of this tensor.
  int64_t storage_offset() const;

  // ---- elements
  /// Returns the address of the first element, on device(). Throws if T is not the dtype.
  template <class T>
  const T* data() const {
    require_dtype(dtype_of<T>);
    return static_cast<const T*>(raw_data());
  }
  /// Returns the address of the first element for writing, and increments the version counter.
  template <class T>
  T* mutable_data() const {
    require_dtype(dtype_of<T>);
    return static_cast<T*>(mutable_raw_data());
  }
  const void* raw_data() const;
  void* mutable_raw_data() const;
  /// Return views for kernels that read and for kernels that write. view_out() increments the version counter.
  View view_in() const;
  View view_out() const;

  /// Returns the element of a tensor with numel() == 1. Converts the element as at() does. Waits for the device.
  template <class T = double>
  T item() const {
    check_item();
    return at<T>(Dims::filled(dim(), 0));
  }
  /// Returns the element at `index`, converted to T. Negative indices count from the end. Conversion to an integer
  /// drops the fraction and throws if T cannot represent the result. Waits for the device.
  template <class T = double>
  T at(const Dims& index) const {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
      return static_cast<T>(read_int(index, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    else
      return static_cast<T>(read(index));
  }
  /// Writes one element. Autograd does not record this write. Throws if the tensor cannot be written in place or if its
  /// integer dtype cannot represent the value.
  void set(const Dims& index, double value) const;
  /// Returns all elements in row-major order. Converts the elements as at() does. Waits for the device. May throw
  /// OutOfMemoryError.
  template <class T = double>
  std::vector<T> to_vector() const;

  // ---- autograd
  bool requires_grad() const;
  /// Selects whether backward passes compute a gradient for this leaf. Throws for integer tensors and for results of
  /// recorded operations.
  const Tensor& requires_grad_(bool value = true) const;
  bool is_leaf() const;
  /// Returns the accumulated gradient, which is undefined until a backward pass has reached this tensor.
  Tensor grad() const;
  /// Replaces the gradient. An undefined tensor clears the gradient.
  void set_grad(const Tensor& grad) const;
  /// Returns the recorded operation that made this tensor, or null for a leaf.
  std::shared_ptr<Node> grad_fn() const;
  /// Adds the gradient of this tensor with respect to each leaf to grad() of that leaf. `gradient` is the gradient of
  /// the loss with respect to this tensor. If this tensor has one element, `gradient` may be omitted and is then 1.
  /// `retain_graph` keeps the graph for another pass. `create_graph` also records the pass itself, so that the
  /// gradients can be differentiated again.
  void backward(const Tensor& gradient = {}, bool retain_graph = false, bool create_graph = false) const;
  /// Returns a tensor that shares storage and version counter but is not part of the graph.
  Tensor detach() const;
  /// Calls `hook` with each gradient of this tensor. If the hook returns a defined tensor, that tensor replaces the
  /// gradient.
  HookHandle register_hook(Hook hook) const;
  /// Calls `hook` with this leaf each time a backward pass has added the complete gradient to grad(). The call happens
  /// during the pass. Throws unless this tensor is a leaf that requires grad.
  HookHandle register_post_accumulate_grad_hook(std::function<void(const Tensor& leaf)> hook) const;
  /// Makes backward passes accumulate the gradient of this non-leaf in grad() after the hooks of the tensor have run.
  /// The gradients of leaves are always accumulated.
  void retain_grad() const;

  // ---- operations as methods: each calls the function of the same name (ops/methods.cpp)
  Tensor clone() const;
  Tensor contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  Tensor to(Device device) const;
  /// Converts the elements by convert() of core/dtype.h: from float to integer, the fraction is dropped, values outside
  /// the range saturate, and NaN becomes 0.
  Tensor to(DType dtype) const;
  Tensor to(Device device, DType dtype) const;
  Tensor reshape(const Shape& shape) const;
  Tensor view(const Shape& shape) const;
  Tensor permute(const Dims& order) const;
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor squeeze(int64_t axis) const;
  Tensor unsqueeze(int64_t axis) const;
  Tensor expand(const Shape& shape) const;
  Tensor narrow(int64_t axis, int64_t start, int64_t length) const;
  Tensor slice(int64_t axis, int64_t start, int64_t stop, int64_t step = 1) const;
  Tensor select(int64_t axis, int64_t index) const;
  /// select() along the first axis.
  Tensor operator[](int64_t index) const { return select(0, index); }
  Tensor flatten(int64_t start_axis = 0, int64_t end_axis = -1) const;
  Tensor add(const Tensor& other) const;
  Tensor sum(const Axes& axes = {}, bool keepdim = false) const;
  Tensor mean(const Axes& axes = {}, bool keepdim = false) const;
  Tensor amax(const Axes& axes = {}, bool keepdim = false) const;
  Tensor amin(const Axes& axes = {}, bool keepdim = false) const;
  Tensor var(const Axes& axes = {}, int64_t correction = 1, bool keepdim = false) const;
  Tensor std(const Axes& axes = {}, int64_t correction = 1, bool keepdim = false) const;
  Tensor prod(const Axes& axes = {}, bool keepdim = false) const;
  Tensor norm(double p = 2, const Axes& axes = {}, bool keepdim = false) const;
  Tensor logsumexp(const Axes& axes, bool keepdim = false) const;
  Tensor cumsum(int64_t axis) const;
  Tensor softmax(int64_t axis) const;
  Tensor log_softmax(int64_t axis) const;
  Tensor argmax(std::optional<int64_t> axis = {}, bool keepdim = false) const;
  Tensor argmin(std::optional<int64_t> axis = {}, bool keepdim = false) const;
  Selection max(int64_t axis, bool keepdim = false) const;
  Selection min(int64_t axis, bool keepdim = false) const;
  Selection sort(int64_t axis = -1, bool descending = false) const;
  Selection topk(int64_t k, int64_t axis = -1, bool largest = true) const;
  Tensors split(int64_t size, int64_t axis = 0) const;
  Tensors split(const std::vector<int64_t>& sizes, int64_t axis = 0) const;
  Tensors chunk(int64_t count, int64_t axis = 0) const;
  // In-place writes. These functions throw if autograd would have to record the write, or if elements of this tensor
  // share memory.
  const Tensor& copy_(const Tensor& source) const;
  const Tensor& fill_(double value) const;
  const Tensor& zero_() const;
  const Tensor& add_(const Tensor& other, double alpha = 1) const;
  const Tensor& mul_(double factor) const;

  /// Returns whether both handles refer to the same tensor. Does not compare elements.
  bool is_same(const Tensor& other) const { return body_ == other.body_; }
  const std::shared_ptr<TensorBody>& body() const { return body_; }

 private:
  void require_dtype(DType expected) const;
  void check_item() const;
  double read(const Dims& index) const;
  int64_t read_int(const Dims& index, int64_t low, uint64_t high) const;

  std::shared_ptr<TensorBody> body_;
};

/// Elements that an operator selected along an axis, and their indices along this axis (i64).
struct Selection {
  Tensor values, indices;
};

/// Prints values, shape, dtype and device as PyTorch does. Abbreviates tensors of more than 1000 elements.
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);
/// Returns the text that operator<< prints.
std::string to_string(const Tensor& tensor);

/// A description of a tensor for error messages. The text is created only when the description is printed, because
/// checks rarely fail.
struct Description {
  const Tensor& tensor;
};
/// Prints the shape, dtype and device of the tensor, or "undefined".
std::ostream& operator<<(std::ostream& out, const Description& description);
/// Prints as "[2, 32, 8] f32 on cuda:0". The result refers to `tensor`; use it in the same statement only.
inline Description describe(const Tensor& tensor) { return {tensor}; }

/// Returns an uninitialized tensor. Throws Error for an invalid shape or device, and OutOfMemoryError.
Tensor empty(const Shape& shape, TensorOptions options = {}, MemoryFormat format = MemoryFormat::contiguous);
/// Returns an uninitialized tensor with the given strides, in elements; a stride may be 0. Throws Error if `shape` and
/// `strides` differ in length, or if a size or a stride is negative. Otherwise throws like empty().
Tensor empty_strided(const Shape& shape, const Strides& strides, TensorOptions options = {});
/// Returns an uninitialized tensor with the shape, dtype and device of `like`. The result has the strides of `like` if
/// `like` is dense; otherwise it has the memory format like.suggest_memory_format().
Tensor empty_like(const Tensor& like);
/// Returns the strides of empty_like(like).
Strides empty_like_strides(const Tensor& like);
/// Returns a view of the storage of `tensor` with another geometry. Autograd does not record this operation. Throws if
/// an element would lie outside the storage.
Tensor as_strided(const Tensor& tensor, const Shape& shape, const Strides& strides, int64_t storage_offset);
/// Returns a tensor that uses memory allocated elsewhere, which must be aligned to the dtype. release(data) is called
/// when the last view is destroyed. If from_blob throws, the caller keeps the memory.
Tensor from_blob(void* data, const Shape& shape, TensorOptions options, std::function<void(void*)> release);

}  // namespace voxgrad
