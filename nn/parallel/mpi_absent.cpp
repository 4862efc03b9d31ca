// Takes the place of mpi.cpp in builds without MPI.
#include "nn/parallel/communicator.h"

namespace voxgrad::parallel {

bool mpi_available() { return false; }

Communicator& mpi_world() {
  fail("parallel::mpi_world",
       "voxgrad was built without MPI; install libopenmpi-dev and openmpi-bin (Debian, Ubuntu), configure with "
       "-DVOXGRAD_MPI=ON and build again");
}

void mpi_finalize() {}

}  // namespace voxgrad::parallel
