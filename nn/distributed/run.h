// The frame of a program that runs as several ranks.
#pragma once

#include <functional>

#include "communicator.h"

namespace voxgrad::distributed {

/// Sets NCCL_NVLS_ENABLE to 0 and CUDA_DEVICE_MAX_CONNECTIONS to 4 where they are not set: two runs have the same bits,
/// and kernels are launched without gaps while others wait (docs/scaling.md). CUDA reads the latter when it is first
/// used. run() on GPUs and launch() do so: call it before them if the program uses a GPU, or asks for one, earlier.
void set_environment();

/// Calls f with all ranks that mpirun, srun or, on GPUs, torchrun started: mpi_world(), or nccl_world() for
/// Device::cuda(), and leaves the group: `int main() { return distributed::run(train); }`. An exception that leaves f
/// on one rank ends the processes of all ranks at once, after one line on stderr: "rank 1 of 4 on host node7:
/// <what()>". Returns 0; 1 if the group could not be made, which a line on stderr explains.
int run(const std::function<void(Communicator& world)>& f, Device device = Device::cpu());

/// Calls f in `ranks` threads of this process, each with the GPU of its rank and a copy of this thread's default
/// generator. set_float32_precision() is for all of them. The threads meet at 127.0.0.1, with a random token. Otherwise
/// as run(): an exception ends the process. Throws Error if this build has no NCCL, or there are fewer GPUs.
int launch(int ranks, const std::function<void(Communicator& world)>& f);

}  // namespace voxgrad::distributed
