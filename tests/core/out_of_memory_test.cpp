// Tests in which operator new fails. Functions must then throw without leaking memory, so that the program can
// continue.
#include <gtest/gtest.h>

#include <exception>

#include "core/autograd.h"
#include "core/io/nifti.h"
#include "core/io/npy.h"
#include "core/io/safetensors.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/core/file_support.h"
#include "tests/failing_allocations.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(OutOfMemory, GraphsLeakNoMemory) {
  const int64_t live = memory::stats().current;
  {
    const Tensor w = ones({3, 4}).requires_grad_();
    with_each_allocation_failing([&] {
      const Tensor h = exp(w * 0.5);
      const Tensor loss = sum(cat({h * w, relu(h)}, 0));
      loss.backward(Tensor(), true);
      grad({loss}, {w}, {}, false, true);
    });
    w.set_grad({});
    sum(w * 2.0).backward();
    EXPECT_EQ(w.grad().to_vector(), std::vector<double>(12, 2));
  }
  EXPECT_EQ(memory::stats().current, live);
}

// If the allocator has no memory to record a freed block in its cache, it returns the block to the system.
TEST(OutOfMemory, LargeBlocksAreFreed) {
  const int64_t live = memory::stats().current;
  with_each_allocation_failing([] {
    const Tensor a = empty({1 << 18}), b = empty({3 << 17});
    EXPECT_NE(a.raw_data(), b.raw_data());
  });
  EXPECT_EQ(memory::stats().current, live);
  EXPECT_EQ(full({1 << 18}, 2).to_vector().back(), 2);
}

// A graph may be freed while an exception propagates, so freeing must not allocate memory.
TEST(OutOfMemory, FreeingALongGraphDoesNotAllocate) {
  Tensor x = ones({}).requires_grad_();
  for (int i = 0; i < 1000; ++i) x = x + 1.0;
  FailingAllocations failing(0, 1);
  x = {};
  EXPECT_EQ(failing.failed(), 0);
}

using OutOfMemoryInFiles = FileTest;

TEST_F(OutOfMemoryInFiles, SavingLeavesTheOldOrTheNewFile) {
  const TensorMap before{{"a", ones({2})}},
      after{{"encoder.layers.0.weight", full({3, 2}, 2)}, {"encoder.layers.0.bias", full({3}, 7, {.dtype = i64})}};
  const Metadata metadata{{"note", "text that is too long for the buffer inside std::string"}};
  const auto save = [&] { save_safetensors(path("f"), after, metadata, {.checksum = true}); };
  long failed = 1;
  for (long number = 0; failed > 0; ++number) {
    save_safetensors(path("f"), before);
    {
      FailingAllocations failing(number);
      try {
        save();
      } catch (const std::exception&) {
      }
      failed = failing.failed();
    }
    Metadata found;
    const TensorMap tensors = load_safetensors(path("f"), Device::cpu(), &found);
    const bool saved = tensors.size() == 2;
    EXPECT_EQ(found, saved ? metadata : Metadata()) << "allocation " << number;
    for (const auto& [name, tensor] : saved ? after : before)
      EXPECT_EQ(tensors.at(name).to_vector(), tensor.to_vector()) << "allocation " << number;
    EXPECT_EQ(file_count(), 1) << "allocation " << number;
  }
  with_each_allocation_failing(save);
  with_each_allocation_failing([&] {
    Metadata found;
    EXPECT_EQ(load_safetensors(path("f"), Device::cpu(), &found).size(), 2u);
    EXPECT_EQ(found, metadata);
  });
  put("bad", "{}{}{}{}{}{}");
  with_each_allocation_failing([&] { load_safetensors(path("bad")); });
}

TEST_F(OutOfMemoryInFiles, NiftiAndNpyFilesSaveAndLoadAfterFailures) {
  const NiftiImage image{.data = arange(0, 24).reshape({2, 3, 4}),
                         .descrip = "text that is too long for the buffer inside std::string"};
  for (const char* name : {"v.nii", "v.nii.gz"}) {
    with_each_allocation_failing([&] { save_nifti(path(name), image); });
    save_nifti(path(name), image);
    with_each_allocation_failing([&] { EXPECT_EQ(load_nifti(path(name)).data.at({1, 0, 1}), 13); });
  }
  with_each_allocation_failing([&] { save_npy(path("a.npy"), image.data); });
  save_npy(path("a.npy"), image.data);
  with_each_allocation_failing([&] { EXPECT_EQ(load_npy(path("a.npy")).at({1, 2, 3}), 23); });
}

TEST(OutOfMemory, ProfilerReportsAreCompleteAfterFailures) {
  const Tensor w = ones({3, 4}).requires_grad_();
  profiler::Session profile;
  {
    const profiler::RecordFunction range("a name that is too long for the buffer inside std::string");
    sum(exp(w * 2.0)).backward();
  }
  profile.stop();
  const std::string trace = profile.trace();
  with_each_allocation_failing([&] { EXPECT_EQ(profile.trace(), trace); });
  with_each_allocation_failing([&] { static_cast<void>(profile.table() + profile.memory_table()); });
}

}  // namespace
}  // namespace voxgrad
