// Functions that run a program on several ranks.
#pragma once

#include <functional>

#include "communicator.h"

namespace voxgrad::distributed {

/// Sets the environment variables NCCL_NVLS_ENABLE to 0 and CUDA_DEVICE_MAX_CONNECTIONS to 4, unless they are already
/// set. With the first setting, two runs give the same bits. With the second setting, kernels are launched without gaps
/// while other streams wait (docs/how-distributed-works.md). CUDA reads the second variable when CUDA is first used.
/// run() on GPUs, launch() and nccl_world() call this function; call it yourself in a program that uses or queries GPUs
/// earlier. In a build without NCCL, the function does nothing.
void set_environment();

/// Calls f(world) with the group of all ranks, and then leaves the group. The group is nccl_world() if `device` is a
/// GPU, otherwise mpi_world(). If f throws on one rank, the processes of all ranks end immediately, after one line on
/// stderr: "rank 1 of 4 on host node7: <what()>". Returns 0. If the group cannot be created, prints the reason on
/// stderr and returns 1. Return this result from main(): `return distributed::run(train);`.
int run(const std::function<void(Communicator& world)>& f, Device device = Device::cpu());

/// Calls f(world) in `ranks` threads of this process. Each thread uses the GPU of its rank and a copy of this thread's
/// default generator; set_float32_precision() applies to all threads. The threads connect through 127.0.0.1 with a
/// random token. If f throws on one rank, the process ends, as in run(). Returns 0. Throws Error if this build has no
/// NCCL, if NCCL cannot be loaded, or if there are fewer GPUs than ranks.
int launch(int ranks, const std::function<void(Communicator& world)>& f);

}  // namespace voxgrad::distributed
