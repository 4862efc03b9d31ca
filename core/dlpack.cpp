// Implements the exchange of tensors with other libraries through DLPack.
#include "core/dlpack.h"

#include <algorithm>

#include "core/autograd.h"

namespace voxgrad {
using namespace dlpack;
namespace {

constexpr DLDataType kDtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 16, 1},
                                  {kDLInt, 64, 1},   {kDLInt, 32, 1},   {kDLUInt, 8, 1},    {kDLBool, 8, 1}};

template <class Managed>
Managed* export_tensor(const Tensor& x) {
  struct Exported {
    std::shared_ptr<Storage> storage;
    Shape shape;
    Strides strides;
    Managed managed{};
  };
  check(x.defined(), "to_dlpack", "the tensor is undefined");
  check(!x.requires_grad(), "to_dlpack", "the tensor requires a gradient; export x.detach() instead");
  void* data = x.numel() ? const_cast<void*>(x.raw_data()) : nullptr;
  const DLDevice device{x.device().is_cuda() ? kDLCUDA : kDLCPU, x.device().index};
  const DLDataType type = kDtypes[static_cast<size_t>(x.dtype())];
  const auto rank = static_cast<int32_t>(x.dim());
  auto* exported = new Exported{x.storage(), x.shape(), x.strides()};
  Managed& managed = exported->managed;
  managed.dl_tensor = {data, device, rank, type, exported->shape.begin(), exported->strides.begin(), 0};
  managed.manager_ctx = exported;
  managed.deleter = [](Managed* self) { delete static_cast<Exported*>(self->manager_ctx); };
  if constexpr (requires { managed.version; }) managed.version = {1, 0};
  return &managed;
}

template <class Managed>
Tensor import_tensor(Managed* managed) {
  constexpr const char* kOp = "from_dlpack";
  // The sum of at most kMaxRank products of this limit with at most 8 bytes per element fits in 64 bits.
  constexpr int64_t kMaxExtent = INT64_MAX / 128;
  check(managed, kOp, "the pointer is null");
  const auto release = [managed](void*) {
    if (managed->deleter) managed->deleter(managed);
  };
  std::unique_ptr<void, decltype(release)> owner(managed, release);
  if constexpr (requires { managed->version; }) {
    check(managed->version.major == 1, kOp, "expected DLPack 1.x, got version ", managed->version.major);
    check(!(managed->flags & kReadOnly), kOp, "the memory is read-only; pass a copy");
  }
  const DLTensor& from = managed->dl_tensor;
  const auto* type = std::find(std::begin(kDtypes), std::end(kDtypes), from.dtype);
  check(type != std::end(kDtypes), kOp, "the dtype with code = ", int{from.dtype.code},
        ", bits = ", int{from.dtype.bits}, " and lanes = ", from.dtype.lanes, " is not supported");
  const auto [place, index] = from.device;
  check(place == kDLCPU || place == kDLCUDA, kOp, "device type ", int{place}, " is not supported");
  const Device device = place == kDLCPU ? Device::cpu() : Device::cuda(index);
  runtime(device).require(device.index);
  check(from.ndim >= 0 && from.ndim <= kMaxRank, kOp, "expected 0 to ", kMaxRank, " axes, got ", from.ndim);
  check(from.ndim == 0 || from.shape, kOp, "the tensor has ndim = ", from.ndim, ", but its shape is null");

  auto body = std::make_shared<TensorBody>();
  body->dtype = static_cast<DType>(type - kDtypes);
  body->shape = std::span(from.shape, static_cast<size_t>(from.ndim));
  body->strides = contiguous_strides(body->shape);
  const bool is_empty = numel(body->shape, kOp) == 0;
  int64_t elements = is_empty ? 0 : 1;  // from the first to the last element in memory
  for (int64_t i = 0; i < from.ndim && !is_empty; ++i) {
    const int64_t size = body->shape[i];
    int64_t& stride = body->strides[i];
    if (from.strides && (size > 1 || from.strides[i] >= 0)) stride = from.strides[i];
    check(stride >= 0 && stride <= kMaxExtent / size, kOp, "axis ", i, " of shape ", body->shape, " has stride ",
          stride, "; expected 0 to ", kMaxExtent / size);
    elements += (size - 1) * stride;
  }
  const int64_t item = item_size(body->dtype);
  check(is_empty || from.data, kOp, "data is null");
  check(from.byte_offset <= kMaxExtent, kOp, "byte_offset ", from.byte_offset, " is too large");
  void* data = is_empty ? nullptr : static_cast<char*>(from.data) + from.byte_offset;
  check(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item) == 0, kOp, "data at byte_offset ",
        from.byte_offset, " is not aligned to the ", item, " bytes of an element of ", body->dtype);
  body->storage = std::make_shared<Storage>(data, static_cast<size_t>(elements * item), device, release);
  static_cast<void>(owner.release());
  return Tensor(std::move(body));
}

}  // namespace

DLManagedTensorVersioned* to_dlpack(const Tensor& x) { return export_tensor<DLManagedTensorVersioned>(x); }
DLManagedTensor* to_dlpack_unversioned(const Tensor& x) { return export_tensor<DLManagedTensor>(x); }
Tensor from_dlpack(DLManagedTensorVersioned* managed) { return import_tensor(managed); }
Tensor from_dlpack(DLManagedTensor* managed) { return import_tensor(managed); }

}  // namespace voxgrad
