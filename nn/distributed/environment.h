// The environment variables that a launcher sets for each process.
#pragma once

#include <optional>
#include <string>

namespace voxgrad::distributed {

/// The environment variables that torchrun, or a script, sets for each process: RANK, WORLD_SIZE, LOCAL_RANK,
/// MASTER_ADDR, MASTER_PORT and, optionally, VOXGRAD_TOKEN.
struct Environment {
  int rank = 0;
  int world_size = 1;  ///< number of processes
  int local_rank = 0;  ///< rank among the processes of this machine
  std::string master_addr{};
  int master_port = 0;
  std::string token{};  ///< the secret that all processes share; empty if VOXGRAD_TOKEN is not set
};

/// Reads the environment variables. Returns nullopt if none of RANK, WORLD_SIZE and LOCAL_RANK is set, as under mpirun
/// and srun. Otherwise throws Error and names the variable if a required variable is missing or invalid.
std::optional<Environment> environment();

}  // namespace voxgrad::distributed
