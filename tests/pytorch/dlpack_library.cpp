// A shared library with a few functions on tensors, through which test_dlpack.py exchanges tensors with NumPy and
// PyTorch. Functions that return a pointer return null after an error; last_error() then returns the message.
#include <voxgrad.h>

#include <string>

namespace vg = voxgrad;

namespace {

thread_local std::string message;

template <class F>
auto guarded(const F& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception& error) {
    message = error.what();
    return {};
  }
}

vg::Dims dims(int rank, const int64_t* values) { return std::span(values, static_cast<size_t>(rank)); }

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* last_error() { return message.c_str(); }
EXPORT int has_cuda() { return vg::cuda::is_available(); }
EXPORT int64_t live_bytes(int cuda) { return vg::memory::stats(cuda ? vg::Device::cuda() : vg::Device::cpu()).current; }

/// Returns a tensor with the values 0, 1, 2, ...; the caller passes it to destroy().
EXPORT vg::Tensor* create(const char* dtype, int cuda, int rank, const int64_t* shape) {
  return guarded([&] {
    const vg::Shape size = dims(rank, shape);
    const vg::Tensor x = vg::arange(0, static_cast<double>(vg::numel(size))).reshape(size);
    return new vg::Tensor(x.to(cuda ? vg::Device::cuda() : vg::Device::cpu(), vg::parse_dtype(dtype)));
  });
}
EXPORT vg::Tensor* transpose(const vg::Tensor* x) {
  return guarded([&] { return new vg::Tensor(x->transpose(0, 1)); });
}
EXPORT void destroy(vg::Tensor* x) { delete x; }
EXPORT void require_grad(const vg::Tensor* x) { x->requires_grad_(); }

EXPORT const char* describe(const vg::Tensor* x) {
  message = vg::concat(vg::describe(*x), " strides ", x->strides());
  return message.c_str();
}
EXPORT double get(const vg::Tensor* x, const int64_t* index) {
  return guarded([&] { return x->at(dims(static_cast<int>(x->dim()), index)); });
}
EXPORT void set(const vg::Tensor* x, const int64_t* index, double value) {
  x->set(dims(static_cast<int>(x->dim()), index), value);
}
EXPORT void synchronize(const vg::Tensor* x) { vg::synchronize(x->device()); }

EXPORT void* export_versioned(const vg::Tensor* x) {
  return guarded([&]() -> void* { return vg::to_dlpack(*x); });
}
EXPORT void* export_unversioned(const vg::Tensor* x) {
  return guarded([&]() -> void* { return vg::to_dlpack_unversioned(*x); });
}
EXPORT vg::Tensor* import_versioned(vg::dlpack::DLManagedTensorVersioned* managed) {
  return guarded([&] { return new vg::Tensor(vg::from_dlpack(managed)); });
}
EXPORT vg::Tensor* import_unversioned(vg::dlpack::DLManagedTensor* managed) {
  return guarded([&] { return new vg::Tensor(vg::from_dlpack(managed)); });
}
