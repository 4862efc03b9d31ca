// A fixture for tests that mpirun or torchrun starts on several ranks.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

#include "nn/distributed/communicator.h"
#include "tests/support.h"

namespace voxgrad {

/// Finalizes MPI or NCCL after the last test.
class RanksEnvironment : public testing::Environment {
  void TearDown() override { on_gpus() ? distributed::nccl_finalize() : distributed::mpi_finalize(); }

 public:
  /// Returns true if the environment variable VOXGRAD_TEST_DEVICE is "cuda". The tests then use GPUs and NCCL;
  /// otherwise, they use CPUs and MPI.
  static bool on_gpus() {
    const char* device = std::getenv("VOXGRAD_TEST_DEVICE");
    return device && device == std::string("cuda");
  }
};

/// A fixture that gives each test the communicator of all ranks. Every rank runs the same tests.
class Ranks : public testing::Test {
 protected:
  void SetUp() override {
    const bool gpus = RanksEnvironment::on_gpus();
    if (!gpus && !distributed::mpi_available()) GTEST_SKIP() << "built without MPI";
    world_ = gpus ? &distributed::nccl_world() : &distributed::mpi_world();
    world_->set_timeout(60);
    rank_ = world_->rank();
    size_ = world_->size();
  }

  /// Expects that `tensor` is bitwise equal on all ranks.
  void expect_same_everywhere(const Tensor& tensor) const {
    const Tensor all = world_->all_gather(tensor);
    const size_t bytes = static_cast<size_t>(tensor.numel() * item_size(tensor.dtype()));
    for (int other = 0; other < size_; ++other)
      EXPECT_EQ(std::memcmp(all[other].raw_data(), all[0].raw_data(), bytes), 0) << "ranks 0 and " << other;
  }

  distributed::Communicator* world_ = nullptr;
  int rank_ = 0;
  int size_ = 1;  // number of ranks
};

}  // namespace voxgrad
