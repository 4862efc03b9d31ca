// The frame of a program that runs as several ranks.
#pragma once

#include <functional>

#include "nn/parallel/communicator.h"

namespace voxgrad::parallel {

/// Calls f with all ranks that mpirun or srun started, and ends MPI: `int main() { return parallel::run(train); }`.
/// An exception that leaves f on one rank ends the processes of all ranks at once, after one line on stderr:
/// "rank 1 of 4 on host node7: <what()>". Returns 0; 1 if MPI could not be started, which a line on stderr explains.
int run(const std::function<void(Communicator& world)>& f);

}  // namespace voxgrad::parallel
