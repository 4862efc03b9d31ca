// Implements run(), which calls a function on several ranks.
#include "nn/distributed/run.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include "nn/distributed/detail/rendezvous.h"

namespace voxgrad::distributed {
namespace {

constexpr int kFailed = 1;

/// Prints the failure and ends the processes of all ranks.
[[noreturn]] void end_all(Communicator& world, const char* what) {
  print_failure(world.rank(), world.size(), what);
  world.abort(kFailed);
  std::_Exit(kFailed);
}

}  // namespace

void run_guarded(Communicator& world, const std::function<void(Communicator& world)>& f) {
  try {
    f(world);
  } catch (const CollectiveError& error) {
    // Only one rank, the reporter, prints the message and ends all ranks. The other ranks give the reporter five
    // seconds.
    if (world.rank() != error.reporter()) std::this_thread::sleep_for(std::chrono::seconds(5));
    end_all(world, error.what());
  } catch (const std::exception& error) {
    end_all(world, error.what());
  } catch (...) {
    end_all(world, "unknown exception");
  }
}

int run(const std::function<void(Communicator& world)>& f, Device device) {
  try {
    check(static_cast<bool>(f), "distributed::run", "the function is empty");
    run_guarded(device.is_cuda() ? nccl_world() : mpi_world(), f);
    device.is_cuda() ? nccl_finalize() : mpi_finalize();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return kFailed;
  }
}

}  // namespace voxgrad::distributed
