// Communicators for the processes of a launcher: NCCL for GPU tensors, MPI for CPU tensors.
#pragma once

#include "../../core/communicator.h"

namespace voxgrad::distributed {

/// Returns whether this build supports NCCL. The library itself is loaded by nccl_world() and launch().
bool nccl_available();
/// Returns the group of all processes that a launcher started. The launcher is torchrun, mpirun, srun, or a program
/// that sets the same variables as torchrun (environment.h). Without a launcher, returns a group of this process alone.
/// Each rank uses the GPU of its local rank. The first call loads the library libnccl.so.2. Processes join with the
/// token VOXGRAD_TOKEN, or with a random token under MPI (docs/distributed.md describes the trust model). Throws Error
/// if this build has no NCCL, if NCCL cannot be loaded, if the GPU does not exist, if the environment is inconsistent,
/// or if ranks are missing after a minute. Also throws if MPI started the processes but this build has no MPI.
///
/// Collectives of GPU tensors are queued on a separate stream, after the earlier work of the current stream. The host
/// does not wait. If a process ends, NCCL fails, or a rank exceeds the timeout, all processes end after one line on
/// stderr that names the rank. Replays of a CUDAGraph have no timeout.
Communicator& nccl_world();
/// Leaves the group. Every rank must call nccl_finalize() after its last use of the group.
void nccl_finalize();

/// Returns whether this build has MPI.
bool mpi_available();
/// Returns the group of all processes that mpirun or srun started, or a group of this process alone. The first call
/// starts MPI. Throws if this build has no MPI, and if the launcher or the environment (environment.h) disagrees with
/// MPI about the rank or the number of ranks.
Communicator& mpi_world();
/// Leaves the group, and ends MPI if mpi_world() started MPI. Every rank must call mpi_finalize() after its last use of
/// the group.
void mpi_finalize();

}  // namespace voxgrad::distributed
