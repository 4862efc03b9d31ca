// The rank of a process among the processes of a launcher.
#pragma once

#include <optional>
#include <string>

namespace voxgrad::distributed {

/// The environment variables that torchrun, or a script, sets for each process: RANK, WORLD_SIZE, LOCAL_RANK,
/// MASTER_ADDR, MASTER_PORT and, optionally, VOXGRAD_TOKEN.
struct Environment {
  int rank = 0, world_size = 1;
  int local_rank = 0;  ///< among the processes of one machine
  std::string master_addr;
  int master_port = 0;
  std::string token;  ///< the secret that all processes share; empty if VOXGRAD_TOKEN is not set
};

/// Returns nullopt if none of RANK, WORLD_SIZE and LOCAL_RANK is set, as under mpirun and srun. Throws and names the
/// variable if one of the five is missing or invalid.
std::optional<Environment> environment();

}  // namespace voxgrad::distributed
