// Where communicators come from: NCCL between GPUs, MPI between CPUs.
#pragma once

#include "../../core/communicator.h"

namespace voxgrad::parallel {

/// Whether this build has NCCL.
bool nccl_available();
/// All processes that torchrun, or whoever sets RANK and the rest (environment.h), mpirun or srun started, each with
/// the GPU of the number of its local rank; the process alone if none did. Throws Error if this build has no NCCL, if
/// there is no such GPU, if the environment makes no sense, if ranks do not come within a minute, and if mpirun is to
/// be understood without MPI in this build.
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
