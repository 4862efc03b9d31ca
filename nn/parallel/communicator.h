// Where communicators come from: NCCL between GPUs, MPI between CPUs.
#pragma once

#include "../../core/communicator.h"

namespace voxgrad::parallel {

/// Whether this build has NCCL.
bool nccl_available();
/// All processes that torchrun, another launcher that sets RANK and the rest (environment.h), mpirun or srun started;
/// the process alone if none did. Each rank uses the GPU of its local rank. Processes join by the token VOXGRAD_TOKEN;
/// those that MPI started get a random one (docs/scaling.md has the trust model). Throws Error if this build has no
/// NCCL, if there is no such GPU, if the environment is inconsistent, if ranks do not come within a minute, and if MPI
/// started the processes but this build has no MPI.
///
/// Its all_reduce, broadcast, all_gather and reduce_scatter of tensors on the GPU are queued in a stream of their own
/// behind what was queued before, and the host goes on. A rank that is gone, an error within NCCL, and a rank that does
/// not come within the timeout end all processes, after one line on stderr that names the rank. What a CUDAGraph
/// replays is not timed.
Communicator& nccl_world();
/// Leaves the group in order: every rank's last call.
void nccl_finalize();

/// Whether this build has MPI.
bool mpi_available();
/// All processes that mpirun or srun started; the process alone if none did. The first call starts MPI. Throws if this
/// build has no MPI, and if the launcher or the environment (environment.h) tells other numbers than MPI.
Communicator& mpi_world();
/// Ends MPI, if mpi_world() started it: every rank's last call.
void mpi_finalize();

}  // namespace voxgrad::parallel
