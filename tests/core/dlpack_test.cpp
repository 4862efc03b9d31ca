// Tests of DLPack: round trips, memory layout of the structures, ownership, and invalid descriptions.
#include "core/dlpack.h"

#include <cstddef>
#include <functional>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using namespace dlpack;

static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, device) == 8 && offsetof(DLTensor, ndim) == 16 &&
              offsetof(DLTensor, dtype) == 20 && offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 &&
              offsetof(DLTensor, byte_offset) == 40);
static_assert(sizeof(DLManagedTensor) == 64 && offsetof(DLManagedTensor, manager_ctx) == 48 &&
              offsetof(DLManagedTensor, deleter) == 56);
static_assert(sizeof(DLManagedTensorVersioned) == 80 && offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
              offsetof(DLManagedTensorVersioned, deleter) == 16 && offsetof(DLManagedTensorVersioned, flags) == 24 &&
              offsetof(DLManagedTensorVersioned, dl_tensor) == 32);

/// Expects that `y` has the memory, the geometry and the dtype of `x`.
void expect_same_memory(const Tensor& y, const Tensor& x) {
  EXPECT_EQ(concat(describe(y)), concat(describe(x)));
  EXPECT_EQ(y.strides(), x.strides());
  EXPECT_EQ(y.raw_data(), x.raw_data());
  EXPECT_EQ(y.to_vector(), x.to_vector());
}

void expect_round_trip(const Tensor& x) {
  const long count = x.storage().use_count();
  expect_same_memory(from_dlpack(to_dlpack(x)), x);
  expect_same_memory(from_dlpack(to_dlpack_unversioned(x)), x);
  EXPECT_EQ(x.storage().use_count(), count);
}

TEST(Dlpack, RoundTripsEveryDtypeOnEveryDevice) {
  for (const Device device : devices())
    for (const DType dtype : {f32, f64, bf16, f16, i64, i32, u8, b8})
      expect_round_trip(arange(0, 6).reshape({2, 3}).to(device, dtype));
}

TEST(Dlpack, RoundTripsScalarsAndViews) {
  const Tensor x = arange(0, 120).reshape({2, 3, 4, 5});
  for (const Tensor& view : {full({}, 7), x.transpose(0, 3), x.slice(3, 1, 5, 2), x.select(1, 2), x.narrow(2, 1, 2),
                             x.select(0, 0).expand({6, 3, 4, 5}), x.contiguous(MemoryFormat::channels_last),
                             empty({2, 1, 4, 4, 4}, {}, MemoryFormat::channels_last).zero_()})
    expect_round_trip(view);
}

TEST(Dlpack, RoundTripsEmptyTensors) {
  for (const Shape& shape : {Shape{0}, Shape{3, 0, 2}, Shape{0, int64_t{1} << 62, 8}}) {
    DLManagedTensorVersioned* managed = to_dlpack(empty(shape, {.dtype = i64}));
    EXPECT_EQ(managed->dl_tensor.data, nullptr);
    const Tensor y = from_dlpack(managed);
    EXPECT_EQ(concat(describe(y)), concat(shape, " i64 on cpu"));
    EXPECT_TRUE(y.clone().to_vector().empty());
  }
  DLManagedTensor* managed = to_dlpack_unversioned(ones({4}).narrow(0, 2, 0));
  EXPECT_EQ(managed->dl_tensor.data, nullptr);
  managed->deleter(managed);
}

TEST(Dlpack, ExportDescribesMemoryShapeStridesAndDtype) {
  const Tensor x = arange(0, 12, 1, {.dtype = i32}).reshape({3, 4}).slice(1, 1, 4, 2);
  DLManagedTensorVersioned* managed = to_dlpack(x);
  const DLTensor& tensor = managed->dl_tensor;
  EXPECT_EQ(managed->version.major, 1u);
  EXPECT_EQ(managed->flags, 0u);
  EXPECT_EQ(tensor.data, x.raw_data());
  EXPECT_EQ(tensor.device.device_type, kDLCPU);
  EXPECT_EQ(tensor.device.device_id, 0);
  EXPECT_EQ(tensor.dtype, (DLDataType{kDLInt, 32, 1}));
  EXPECT_EQ(Dims(std::span(tensor.shape, 2)), (Shape{3, 2}));
  EXPECT_EQ(Dims(std::span(tensor.strides, 2)), (Strides{4, 2}));
  EXPECT_EQ(tensor.ndim, 2);
  EXPECT_EQ(tensor.byte_offset, 0u);
  managed->deleter(managed);
}

TEST(Dlpack, SharesMemoryBothWays) {
  const Tensor x = zeros({2, 3});
  const Tensor y = from_dlpack(to_dlpack(x.transpose(0, 1)));
  x.set({1, 2}, 5);
  EXPECT_EQ(y.at({2, 1}), 5);
  y.fill_(4);
  EXPECT_EQ(x.to_vector(), std::vector<double>(6, 4));
}

TEST(Dlpack, ExportKeepsTheMemoryAlive) {
  Tensor x = full({3}, 2);
  const std::weak_ptr<Storage> storage = x.storage();
  DLManagedTensorVersioned* managed = to_dlpack(x);
  x = Tensor();
  EXPECT_EQ(static_cast<const float*>(managed->dl_tensor.data)[2], 2);
  EXPECT_FALSE(storage.expired());
  managed->deleter(managed);
  EXPECT_TRUE(storage.expired());
}

TEST(Dlpack, RejectsTensorsThatCannotBeExported) {
  const Tensor w = ones({2}, {.requires_grad = true});
  EXPECT_ERROR(to_dlpack(w), "to_dlpack: the tensor requires a gradient; export x.detach() instead");
  EXPECT_ERROR(to_dlpack(2 * w), "requires a gradient");
  EXPECT_ERROR(to_dlpack_unversioned(w), "to_dlpack: the tensor requires a gradient");
  EXPECT_ERROR(to_dlpack(Tensor()), "to_dlpack: the tensor is undefined");
  expect_round_trip(w.detach());
}

/// A DLPack producer. Tests may modify its members. Counts the calls of the deleter.
template <class Managed>
struct Producer {
  alignas(8) float values[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  int64_t shape[9] = {2, 2, 1, 1, 1, 1, 1, 1, 1};
  int64_t strides[9] = {4, 2, 1, 1, 1, 1, 1, 1, 1};
  int deleted = 0;
  Managed managed{};
  DLTensor& tensor = managed.dl_tensor;

  Producer() {
    managed.manager_ctx = this;
    managed.deleter = [](Managed* self) { ++static_cast<Producer*>(self->manager_ctx)->deleted; };
    if constexpr (requires { managed.version; }) managed.version = {1, 3};
    tensor = {values, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, strides, 0};
  }
  Producer(const Producer&) = delete;
  Producer& operator=(const Producer&) = delete;
};

template <class Managed>
class DlpackImport : public ::testing::Test {};
using Structures = ::testing::Types<DLManagedTensor, DLManagedTensorVersioned>;
TYPED_TEST_SUITE(DlpackImport, Structures);

TYPED_TEST(DlpackImport, CallsTheDeleterOnceWhenTheLastViewIsDestroyed) {
  Producer<TypeParam> producer;
  Tensor view;
  {
    const Tensor x = from_dlpack(&producer.managed);
    EXPECT_EQ(x.to_vector(), (std::vector<double>{0, 2, 4, 6}));
    EXPECT_EQ(x.storage()->bytes(), 7 * sizeof(float));
    view = x[1];
  }
  EXPECT_EQ(producer.deleted, 0);
  view.fill_(9);
  EXPECT_EQ(producer.values[6], 9);
  view = Tensor();
  EXPECT_EQ(producer.deleted, 1);
}

TYPED_TEST(DlpackImport, CallsTheDeleterOnceIfMemoryRunsOut) {
  int calls = 0, deleted = 0;
  with_each_allocation_failing([&] {
    Producer<TypeParam> producer;
    ++calls;
    try {
      from_dlpack(&producer.managed);
    } catch (const std::bad_alloc&) {
    }
    deleted += producer.deleted;
  });
  EXPECT_GT(calls, 1);
  EXPECT_EQ(deleted, calls);
}

TYPED_TEST(DlpackImport, AcceptsNullDeleterStridesAndShape) {
  Producer<TypeParam> producer;
  producer.managed.deleter = nullptr;  // the memory is never released
  producer.tensor.strides = nullptr;   // contiguous
  producer.tensor.byte_offset = 8;
  EXPECT_EQ(from_dlpack(&producer.managed).to_vector(), (std::vector<double>{2, 3, 4, 5}));
  producer.tensor.ndim = 0;
  producer.tensor.shape = nullptr;
  EXPECT_EQ(from_dlpack(&producer.managed).item(), 2);
}

TYPED_TEST(DlpackImport, IgnoresNegativeStridesOfAxesWithOneElement) {
  Producer<TypeParam> producer;
  producer.shape[0] = 1;
  producer.strides[0] = -4;
  EXPECT_EQ(from_dlpack(&producer.managed).to_vector(), (std::vector<double>{0, 2}));
}

TYPED_TEST(DlpackImport, RejectsInvalidDescriptionsAndCallsTheDeleter) {
  using Source = Producer<TypeParam>;
  struct Case {
    const char* message;
    std::function<void(Source&)> change;
  };
  const Case cases[] = {
      {"dtype with code = 5, bits = 64 and lanes = 1",
       [](Source& p) {
         p.tensor.dtype = {5, 64, 1};
       }},
      {"dtype with code = 0, bits = 16 and lanes = 1",
       [](Source& p) {
         p.tensor.dtype = {kDLInt, 16, 1};
       }},
      {"dtype with code = 2, bits = 32 and lanes = 4", [](Source& p) { p.tensor.dtype.lanes = 4; }},
      {"device type 10 is not supported",
       [](Source& p) {
         p.tensor.device = {DLDeviceType{10}, 0};
       }},
      {"99",
       [](Source& p) {
         p.tensor.device = {kDLCUDA, 99};
       }},
      {"expected 0 to 8 axes, got 9", [](Source& p) { p.tensor.ndim = 9; }},
      {"expected 0 to 8 axes, got -1", [](Source& p) { p.tensor.ndim = -1; }},
      {"ndim = 2, but its shape is null", [](Source& p) { p.tensor.shape = nullptr; }},
      {"sizes must not be negative", [](Source& p) { p.shape[1] = -1; }},
      {"does not fit in 64 bits", [](Source& p) { p.shape[0] = p.shape[1] = int64_t{1} << 40; }},
      {"axis 1 of shape [2, 2] has stride -2; expected 0 to", [](Source& p) { p.strides[1] = -2; }},
      {"axis 0 of shape [2, 2] has stride 9223372036854775807", [](Source& p) { p.strides[0] = INT64_MAX; }},
      {"axis 0 of shape [1152921504606846976, 2] has stride 4", [](Source& p) { p.shape[0] = int64_t{1} << 60; }},
      {"from_dlpack: data is null", [](Source& p) { p.tensor.data = nullptr; }},
      {"byte_offset 2 is not aligned to the 4 bytes", [](Source& p) { p.tensor.byte_offset = 2; }},
      {"byte_offset 18446744073709551612 is too large", [](Source& p) { p.tensor.byte_offset = ~uint64_t{3}; }},
  };
  for (const Case& c : cases) {
    Source producer;
    c.change(producer);
    EXPECT_ERROR(from_dlpack(&producer.managed), c.message);
    EXPECT_EQ(producer.deleted, 1) << c.message;
  }
  EXPECT_ERROR(from_dlpack(static_cast<TypeParam*>(nullptr)), "from_dlpack: the pointer is null");
}

TEST(Dlpack, ChecksVersionAndFlags) {
  Producer<DLManagedTensorVersioned> next, constant, copied;
  next.managed.version = {2, 0};
  EXPECT_ERROR(from_dlpack(&next.managed), "from_dlpack: expected DLPack 1.x, got version 2");
  EXPECT_EQ(next.deleted, 1);
  constant.managed.flags = kReadOnly | kIsCopied;
  EXPECT_ERROR(from_dlpack(&constant.managed), "from_dlpack: the memory is read-only; pass a copy");
  EXPECT_EQ(constant.deleted, 1);
  copied.managed.flags = kIsCopied;
  EXPECT_EQ(from_dlpack(&copied.managed).numel(), 4);
  EXPECT_EQ(copied.deleted, 1);
}

}  // namespace
}  // namespace voxgrad
