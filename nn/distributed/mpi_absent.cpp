// Replaces mpi.cpp in builds without MPI.
#include "nn/distributed/communicator.h"

namespace voxgrad::distributed {

bool mpi_available() { return false; }

Communicator& mpi_world() {
  fail("distributed::mpi_world",
       "voxgrad was built without MPI; install libopenmpi-dev and openmpi-bin (Debian, Ubuntu), configure with "
       "-DVOXGRAD_MPI=ON and rebuild");
}

void mpi_finalize() {}

}  // namespace voxgrad::distributed
