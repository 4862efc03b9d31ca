// Replaces nccl.cpp in builds without NCCL.
#include "nn/distributed/communicator.h"
#include "nn/distributed/run.h"

namespace voxgrad::distributed {
namespace {

[[noreturn]] void fail_absent(const char* op) {
  fail(op,
       "voxgrad was built without NCCL; install CUDA and libnccl-dev (from NVIDIA's packages), configure with "
       "-DVOXGRAD_NCCL=ON and rebuild");
}

}  // namespace

bool nccl_available() { return false; }

void set_environment() {}

Communicator& nccl_world() { fail_absent("distributed::nccl_world"); }

void nccl_finalize() {}

int launch(int, const std::function<void(Communicator&)>&) { fail_absent("distributed::launch"); }

}  // namespace voxgrad::distributed
