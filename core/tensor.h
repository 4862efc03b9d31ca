// The tensor: a cheap handle to a shared body of storage, geometry and autograd data.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
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
using Tensors = std::vector<Tensor>;
/// Sees a gradient; a defined result replaces it.
using Hook = std::function<Tensor(const Tensor& grad)>;

/// A registered hook. It stays when the handle goes; remove() takes it away, also while a backward pass runs.
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

/// What a new tensor is made of.
struct TensorOptions {
  DType dtype = DType::f32;
  Device device = Device::cpu();
  bool requires_grad = false;
};

/// How the axes of a dense (N, C, spatial...) tensor lie in memory.
enum class MemoryFormat : uint8_t { contiguous, channels_last };

/// The right side of an assignment to a temporary Tensor, which does not compile: see Tensor.
struct AssignmentToTemporaryTensor_use_copy_ {
  template <class T>
  AssignmentToTemporaryTensor_use_copy_(const T& value);
};

/// An n-dimensional array on one device. Copying a Tensor copies the handle: both see the same elements
/// and the same gradient; clone() copies the elements. A default-constructed Tensor is undefined.
///
/// Assigning to a temporary handle does not compile, because it would leave all elements as they are. In place of
/// x[0] = y or x.narrow(0, 1, 2) = y, write x[0].copy_(y).
///
/// Threads may read a tensor at the same time, compute with it, and run backward passes that end in it
/// (core/autograd.h). While one writes elements, calls requires_grad_() or set_grad(), or assigns to a handle, no other
/// may use that tensor or handle.
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

  // ---- what it is
  bool defined() const { return body_ != nullptr; }
  const Shape& shape() const;
  const Strides& strides() const;
  /// The size of one axis; negative axes count from the end.
  int64_t size(int64_t axis) const;
  int64_t dim() const { return shape().size(); }
  int64_t numel() const;
  DType dtype() const;
  Device device() const;
  TensorOptions options() const { return {dtype(), device(), false}; }
  bool is_contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  /// channels_last if the axes lie in that order, as those of a part of such a tensor do, and the tensor is not
  /// contiguous; else contiguous. Of one channel, the format that contiguous() or empty() was given.
  MemoryFormat suggest_memory_format() const;
  const std::shared_ptr<Storage>& storage() const;
  /// Elements between the start of the storage and the first element.
  int64_t storage_offset() const;

  // ---- elements
  /// Address of the first element, on device(). Throws if T is not the dtype.
  template <class T>
  const T* data() const {
    require_dtype(dtype_of<T>);
    return static_cast<const T*>(raw_data());
  }
  /// The same, for writing: notes the write in the version counter.
  template <class T>
  T* mutable_data() const {
    require_dtype(dtype_of<T>);
    return static_cast<T*>(mutable_raw_data());
  }
  const void* raw_data() const;
  void* mutable_raw_data() const;
  /// For kernels that read, and for kernels that write (notes the write).
  View view_in() const;
  View view_out() const;

  /// The one element of a tensor with numel() == 1, converted as by at(). Copies from the GPU and waits.
  template <class T = double>
  T item() const {
    check_item();
    return at<T>(Dims::filled(dim(), 0));
  }
  /// The element at `index`, where negative numbers count from the end, converted to T: integers lose the fraction.
  /// Throws if an integer T cannot hold it. Copies from the GPU and waits.
  template <class T = double>
  T at(const Dims& index) const {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
      return static_cast<T>(read_int(index, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    else
      return static_cast<T>(read(index));
  }
  /// Writes one element. Not recorded by autograd. Throws where writing in place would, and if an integer dtype cannot
  /// hold the value.
  void set(const Dims& index, double value) const;
  /// All elements in row-major order, converted as by at(), on the CPU. Throws OutOfMemoryError too.
  template <class T = double>
  std::vector<T> to_vector() const;

  // ---- autograd
  bool requires_grad() const;
  /// Marks a leaf as wanting a gradient. Throws for integers and for results of recorded operations.
  const Tensor& requires_grad_(bool value = true) const;
  bool is_leaf() const;
  /// The accumulated gradient; undefined until backward() reached this tensor.
  Tensor grad() const;
  /// Replaces the gradient; an undefined tensor clears it.
  void set_grad(const Tensor& grad) const;
  /// The operation that made this tensor; null for leaves.
  std::shared_ptr<Node> grad_fn() const;
  /// Adds d(this)/d(leaf) to the gradient of every leaf. `gradient` may be left out for one element.
  void backward(const Tensor& gradient = {}, bool retain_graph = false, bool create_graph = false) const;
  /// The same elements, cut off from the graph. Shares storage and version counter.
  Tensor detach() const;
  /// Calls `hook` with each gradient that arrives here; a defined result replaces it.
  HookHandle register_hook(Hook hook) const;
  /// Calls `hook` with this leaf each time a backward pass has added to its grad(): within the pass, as soon as nothing
  /// more can arrive here. Throws unless this is a leaf that requires grad.
  HookHandle register_post_accumulate_grad_hook(std::function<void(const Tensor& leaf)> hook) const;
  /// Adds the gradients that arrive at a non-leaf, as its hooks leave them, to grad(). Leaves do so anyway.
  void retain_grad() const;

  // ---- operations that read well as methods; defined in ops/methods.cpp, each as the function it names
  Tensor clone() const;
  Tensor contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  Tensor to(Device device) const;
  /// Elements as convert() of core/dtype.h makes them: to an integer, floats lose their fraction, saturate, and NaN
  /// becomes 0.
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
  // Writes in place; throw if autograd would have to record them, or if elements of this tensor share memory.
  const Tensor& copy_(const Tensor& source) const;
  const Tensor& fill_(double value) const;
  const Tensor& zero_() const;
  const Tensor& add_(const Tensor& other, double alpha = 1) const;
  const Tensor& mul_(double factor) const;

  /// Identity of the handle: true if both are the same tensor (not: equal elements).
  bool is_same(const Tensor& other) const { return body_ == other.body_; }
  const std::shared_ptr<TensorBody>& body() const { return body_; }

 private:
  void require_dtype(DType expected) const;
  void check_item() const;
  double read(const Dims& index) const;
  int64_t read_int(const Dims& index, int64_t low, uint64_t high) const;

  std::shared_ptr<TensorBody> body_;
};

/// Elements that an operator chose along an axis, and where they stand there (i64).
struct Selection {
  Tensor values, indices;
};

/// Values, shape, dtype and device in PyTorch's form, shortened when there are more than 1000 elements.
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);
std::string to_string(const Tensor& tensor);

/// For messages: what a tensor is, made into text when it is printed, which that of a check hardly ever is.
struct Description {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, const Description& description);
/// "[2, 32, 8] f32 on cuda:0". For use in the same statement.
inline Description describe(const Tensor& tensor) { return {tensor}; }

/// An uninitialised tensor. Throws Error for a bad shape or device, OutOfMemoryError.
Tensor empty(const Shape& shape, TensorOptions options = {}, MemoryFormat format = MemoryFormat::contiguous);
Tensor empty_strided(const Shape& shape, const Strides& strides, TensorOptions options = {});
/// Shape, dtype, device of `like`; its strides too if it is dense, else its memory format.
Tensor empty_like(const Tensor& like);
/// The strides of that, without allocating it.
Strides empty_like_strides(const Tensor& like);
/// Elements of `tensor`'s storage seen through another geometry; not recorded by autograd.
/// Throws if an element would lie outside the storage.
Tensor as_strided(const Tensor& tensor, const Shape& shape, const Strides& strides, int64_t storage_offset);
/// A tensor over memory from elsewhere, aligned to its dtype; `release` is called when the last view is gone, and not
/// if from_blob throws.
Tensor from_blob(void* data, const Shape& shape, TensorOptions options, std::function<void(void*)> release);

}  // namespace voxgrad
