// Exchanges tensors with other libraries, such as NumPy and PyTorch, through DLPack 1.x, without a copy.
#pragma once

#include "tensor.h"

namespace voxgrad {

/// The structures of DLPack (https://dmlc.github.io/dlpack/latest/c_api.html) with the names and the memory layout of
/// dlpack.h. A program that also includes dlpack.h converts pointers with reinterpret_cast.
namespace dlpack {
enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2 };
enum DLDataTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };
enum Flags : uint64_t { kReadOnly = 1, kIsCopied = 2 };
struct DLPackVersion {
  uint32_t major, minor;
};
struct DLDevice {
  DLDeviceType device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const DLDataType&) const = default;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;  // strides are in elements; null means contiguous
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};
}  // namespace dlpack

/// Returns a DLPack structure that shares the memory of the tensor. The memory stays allocated until the consumer calls
/// `deleter`, once, on any thread. Autograd does not detect writes by the consumer. Throws if the tensor requires a
/// gradient, as PyTorch does; export x.detach(). The functions of this file do not wait for a GPU: if producer and
/// consumer use different streams, the caller must synchronize the streams before the consumer uses the memory, and
/// before the memory is released.
dlpack::DLManagedTensorVersioned* to_dlpack(const Tensor& tensor);
/// Does the same for consumers that do not support DLPack 1.0.
dlpack::DLManagedTensor* to_dlpack_unversioned(const Tensor& tensor);

/// Returns a tensor that shares the memory of `managed`. The result keeps the strides unless it is empty. Takes
/// ownership: `deleter` is called when the last view is destroyed, or before the function throws. Throws for a major
/// version other than 1, for dtypes and devices that voxgrad does not support, for more than kMaxRank axes, and for
/// negative strides. Also throws for memory that is read-only, null, too large or not aligned to the dtype.
Tensor from_dlpack(dlpack::DLManagedTensorVersioned* managed);
Tensor from_dlpack(dlpack::DLManagedTensor* managed);

}  // namespace voxgrad
