// The place of a process among those that one launcher started.
#pragma once

#include <optional>
#include <string>

namespace voxgrad::parallel {

/// What torchrun, or a script, tells a process by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
struct Environment {
  int rank = 0, world_size = 1;
  int local_rank = 0;  ///< among the processes of one machine
  std::string master_addr;
  int master_port = 0;
};

/// nullopt if none of RANK, WORLD_SIZE and LOCAL_RANK is set: mpirun and srun pass the ranks in ways of their own.
/// Throws, and names the variable, if one of the five is missing or has a value that cannot be.
std::optional<Environment> environment();

}  // namespace voxgrad::parallel
