// Implements the members of Tensor that need no operators.
#include "core/tensor.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/autograd.h"
#include "core/capture.h"

namespace voxgrad {
namespace {

TensorBody& body_of(const Tensor& tensor, const char* op) {
  check(tensor.defined(), op, "the tensor is undefined");
  return *tensor.body();
}

/// Returns the range [low, high) of the offsets of all elements of a tensor with this shape and these strides.
std::pair<int64_t, int64_t> reach(const Shape& shape, const Strides& strides, const char* op) {
  int64_t low = 0, high = 0;
  bool overflow = false;
  for (int64_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return {0, 0};
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(shape[i] - 1, strides[i], &step);
    overflow |= __builtin_add_overflow(step < 0 ? low : high, step, step < 0 ? &low : &high);
  }
  check(!overflow && low > INT64_MIN && high < INT64_MAX, op, "the offsets of shape ", shape, " with strides ", strides,
        " do not fit in 64 bits");
  return {low, high + 1};
}

int64_t bytes_for(int64_t elements, DType dtype, const char* op) {
  int64_t bytes = 0;
  check(!__builtin_mul_overflow(elements, item_size(dtype), &bytes), op, "the number of bytes of ", elements,
        " elements of ", dtype, " does not fit in 64 bits");
  return bytes;
}

bool has_strides(const Shape& shape, const Strides& strides, const Strides& expected) {
  for (int64_t i = 0; i < shape.size(); ++i)
    if (shape[i] > 1 && strides[i] != expected[i]) return false;
  return true;
}

/// Returns whether the axes are in the order of channels_last, as in a channels_last tensor or in a slice of such a
/// tensor.
bool is_in_order_of_channels_last(const Shape& shape, const Strides& strides) {
  if (shape.size() < 3 || shape[1] <= 1) return false;
  Dims order{1};  // from the innermost axis
  for (int64_t axis = shape.size() - 1; axis > 1; --axis) order.push_back(axis);
  order.push_back(0);
  int64_t min_stride = 1;
  for (const int64_t axis : order) {
    if (shape[axis] <= 1) continue;
    if (strides[axis] < min_stride) return false;
    min_stride = next_stride(strides[axis], shape[axis]);
  }
  return true;
}

/// Returns whether the tensor covers its range of memory without gaps, in any order of the axes.
bool is_dense(const Shape& shape, const Strides& strides) {
  Dims order;
  for (int64_t i = 0; i < shape.size(); ++i)
    if (shape[i] != 1) insert_sorted(order, i, [&](int64_t axis) { return strides[axis]; });
  int64_t expected = 1;
  for (int64_t axis : order) {
    if (strides[axis] != expected) return false;
    expected = next_stride(expected, shape[axis]);
  }
  return true;
}

/// Returns the element at `data` as a T. If T is an integer type, drops the fraction and throws if T cannot represent
/// the result.
template <class T>
T load(const char* op, const void* data, DType dtype) {
  T value{};
  dispatch(Anything(), dtype, op, "CPU", [&]<class S>() {
    S stored;
    std::memcpy(static_cast<void*>(&stored), data, sizeof(S));
    if constexpr (std::is_integral_v<T> && !std::is_integral_v<S>) check_fits(op, stored, dtype_of<T>);
    value = static_cast<T>(stored);
  });
  return value;
}

int64_t offset_of(const Tensor& tensor, const Dims& index) {
  check(index.size() == tensor.dim(), "at", "index ", index, " does not fit shape ", tensor.shape());
  int64_t offset = tensor.storage_offset();
  for (int64_t i = 0; i < index.size(); ++i) {
    const int64_t size = tensor.shape()[i];
    check(index[i] >= -size && index[i] < size, "at", "index ", index, " is out of range for shape ", tensor.shape());
    offset += (index[i] < 0 ? index[i] + size : index[i]) * tensor.strides()[i];
  }
  return offset * item_size(tensor.dtype());
}

template <class T>
T read_element(const char* op, const Tensor& tensor, const Dims& index) {
  char bytes[8];
  const auto* from = static_cast<const char*>(tensor.storage()->data()) + offset_of(tensor, index);
  copy_bytes(bytes, Device::cpu(), from, tensor.device(), item_size(tensor.dtype()));
  return load<T>(op, bytes, tensor.dtype());
}

View view_of(const TensorBody& body, bool write) {
  if (Capture* capture = Capture::current()) capture->use(body.storage, write);
  View view;
  view.data = static_cast<char*>(body.storage->data()) + body.offset * item_size(body.dtype);
  view.dtype = body.dtype;
  view.device = body.storage->device().is_cuda() ? body.storage->device().index : -1;
  view.rank = static_cast<int>(body.shape.size());
  std::copy(body.shape.begin(), body.shape.end(), view.size);
  std::copy(body.strides.begin(), body.strides.end(), view.stride);
  return view;
}

}  // namespace

const Shape& Tensor::shape() const { return body_of(*this, "shape").shape; }
const Strides& Tensor::strides() const { return body_of(*this, "strides").strides; }
int64_t Tensor::size(int64_t axis) const {
  check(dim() > 0, "size", "the tensor has no axes");
  return shape()[normalize_axis(axis, dim(), "size")];
}
int64_t Tensor::numel() const { return voxgrad::numel(shape()); }
DType Tensor::dtype() const { return body_of(*this, "dtype").dtype; }
Device Tensor::device() const { return body_of(*this, "device").storage->device(); }
const std::shared_ptr<Storage>& Tensor::storage() const { return body_of(*this, "storage").storage; }
int64_t Tensor::storage_offset() const { return body_of(*this, "storage_offset").offset; }

bool Tensor::is_contiguous(MemoryFormat format) const {
  if (format == MemoryFormat::contiguous) return has_strides(shape(), strides(), contiguous_strides(shape()));
  return dim() >= 3 && has_strides(shape(), strides(), channels_last_strides(shape()));
}

MemoryFormat Tensor::suggest_memory_format() const {
  // With one channel, both formats have the same order of elements. The strides show which format was requested.
  const bool last = dim() >= 3 && size(1) == 1
                        ? strides() == channels_last_strides(shape()) && strides() != contiguous_strides(shape())
                        : !is_contiguous() && is_in_order_of_channels_last(shape(), strides());
  return last ? MemoryFormat::channels_last : MemoryFormat::contiguous;
}

const void* Tensor::raw_data() const { return view_of(body_of(*this, "data"), false).data; }
void* Tensor::mutable_raw_data() const { return view_out().data; }
View Tensor::view_in() const { return view_of(body_of(*this, "data"), false); }
View Tensor::view_out() const {
  TensorBody& body = body_of(*this, "data");
  body.storage->bump_version();
  return view_of(body, true);
}

void Tensor::require_dtype(DType expected) const {
  check(dtype() == expected, "data", "the requested dtype is ", expected, ", but the tensor is ", describe(*this));
}
void Tensor::check_item() const {
  check(numel() == 1, "item", "needs a tensor with one element, got ", describe(*this));
}
double Tensor::read(const Dims& index) const { return read_element<double>("at", *this, index); }
int64_t Tensor::read_int(const Dims& index, int64_t low, uint64_t high) const {
  const auto value = read_element<int64_t>("at", *this, index);
  check(value >= low && (value < 0 || static_cast<uint64_t>(value) <= high), "at", value,
        " does not fit the requested type, whose range is [", low, ", ", high, ']');
  return value;
}

void Tensor::set(const Dims& index, double value) const {
  check_in_place("set", *this);
  check_fits("set", value, dtype());
  char bytes[8];
  dispatch(Anything(), dtype(), "set", "CPU", [&]<class T>() {
    T stored;
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
      stored = T(static_cast<float>(value));
    else
      stored = static_cast<T>(value);
    std::memcpy(bytes, &stored, sizeof(T));
  });
  storage()->bump_version();
  auto* to = static_cast<char*>(storage()->data()) + offset_of(*this, index);
  copy_bytes(to, device(), bytes, Device::cpu(), item_size(dtype()));
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  std::vector<T> values;
  try {
    values.resize(static_cast<size_t>(numel()));
  } catch (const std::exception&) {  // bad_alloc, or length_error if the size exceeds max_size()
    throw OutOfMemoryError(concat("to_vector: out of memory on cpu for ", numel(), " elements of ", sizeof(T),
                                  " bytes, to copy ", describe(*this)));
  }
  const Tensor host = detach().to(Device::cpu()).contiguous();
  const auto* from = static_cast<const char*>(host.raw_data());
  for (T& value : values) {
    value = load<T>("to_vector", from, dtype());
    from += item_size(dtype());
  }
  return values;
}
template std::vector<double> Tensor::to_vector() const;
template std::vector<float> Tensor::to_vector() const;
template std::vector<int64_t> Tensor::to_vector() const;

Tensor empty_strided(const Shape& shape, const Strides& strides, TensorOptions options) {
  check(shape.size() == strides.size(), "empty", "shape ", shape, " and strides ", strides, " differ in rank");
  numel(shape, "empty");  // throws for negative sizes
  const auto [low, high] = reach(shape, strides, "empty");
  check(low == 0, "empty", "strides must not be negative, got ", strides);
  auto storage =
      std::make_shared<Storage>(static_cast<size_t>(bytes_for(high, options.dtype, "empty")), options.device);
  Tensor tensor(std::make_shared<TensorBody>(TensorBody{std::move(storage), 0, shape, strides, options.dtype}));
  if (options.requires_grad) tensor.requires_grad_();
  return tensor;
}

Tensor empty(const Shape& shape, TensorOptions options, MemoryFormat format) {
  bytes_for(numel(shape, "empty"), options.dtype, "empty");
  const bool last = format == MemoryFormat::channels_last;
  return empty_strided(shape, last ? channels_last_strides(shape) : contiguous_strides(shape), options);
}

Strides empty_like_strides(const Tensor& like) {
  if (is_dense(like.shape(), like.strides())) return like.strides();
  const bool last = like.suggest_memory_format() == MemoryFormat::channels_last;
  return last ? channels_last_strides(like.shape()) : contiguous_strides(like.shape());
}

Tensor empty_like(const Tensor& like) { return empty_strided(like.shape(), empty_like_strides(like), like.options()); }

Tensor as_strided(const Tensor& tensor, const Shape& shape, const Strides& strides, int64_t storage_offset) {
  check(shape.size() == strides.size(), "as_strided", "shape ", shape, " and strides ", strides, " differ in rank");
  if (numel(shape, "as_strided") == 0) storage_offset = 0;  // an empty tensor needs no offset
  const auto [low, high] = reach(shape, strides, "as_strided");
  const auto available = static_cast<int64_t>(tensor.storage()->bytes()) / item_size(tensor.dtype());
  const bool inside = storage_offset >= -low && storage_offset <= available && high <= available - storage_offset;
  check(inside, "as_strided", "shape ", shape, " with strides ", strides, " and offset ", storage_offset,
        " reaches outside a storage of ", available, available == 1 ? " element" : " elements");
  return Tensor(
      std::make_shared<TensorBody>(TensorBody{tensor.storage(), storage_offset, shape, strides, tensor.dtype()}));
}

Tensor from_blob(void* data, const Shape& shape, TensorOptions options, std::function<void(void*)> release) {
  runtime(options.device).require(options.device.index);
  const int64_t bytes = bytes_for(numel(shape, "from_blob"), options.dtype, "from_blob");
  check(data != nullptr || bytes == 0, "from_blob", "data is null");
  check(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item_size(options.dtype)) == 0, "from_blob",
        "data at ", data, " is not aligned to the ", item_size(options.dtype), " bytes of an element of ",
        options.dtype);
  check(!options.requires_grad || is_floating(options.dtype), "from_blob",
        "only floating-point tensors have gradients, got ", shape, ' ', options.dtype);
  if (!release) release = [](void*) {};
  auto body = std::make_shared<TensorBody>(TensorBody{nullptr, 0, shape, contiguous_strides(shape), options.dtype});
  if (options.requires_grad) {
    body->autograd = std::make_unique<AutogradData>();
    body->autograd->requires_grad = true;
  }
  // Created last, because its destructor calls release. If an earlier check throws, the caller still owns `data`.
  body->storage = std::make_shared<Storage>(data, static_cast<size_t>(bytes), options.device, std::move(release));
  return Tensor(std::move(body));
}

std::ostream& operator<<(std::ostream& out, const Description& description) {
  const Tensor& t = description.tensor;
  if (!t.defined()) return out << "undefined";
  return out << t.shape() << ' ' << t.dtype() << " on " << t.device();
}

}  // namespace voxgrad
