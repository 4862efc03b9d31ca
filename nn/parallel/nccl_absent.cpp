// Takes the place of nccl.cpp in builds without NCCL.
#include "nn/parallel/communicator.h"
#include "nn/parallel/run.h"

namespace voxgrad::parallel {
namespace {

[[noreturn]] void fail_absent(const char* op) {
  fail(op,
       "voxgrad was built without NCCL; install CUDA and libnccl-dev (of NVIDIA's packages), configure with "
       "-DVOXGRAD_NCCL=ON and build again");
}

}  // namespace

bool nccl_available() { return false; }

void set_environment() {}

Communicator& nccl_world() { fail_absent("parallel::nccl_world"); }

void nccl_finalize() {}

int launch(int, const std::function<void(Communicator&)>&) { fail_absent("parallel::launch"); }

}  // namespace voxgrad::parallel
