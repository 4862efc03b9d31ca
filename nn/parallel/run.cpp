#include "nn/parallel/run.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

namespace voxgrad::parallel {
namespace {

constexpr int kFailed = 1;

/// In one write(), so that the lines of two processes do not mix.
void print_error(const std::string& line) {
  std::fflush(nullptr);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

[[noreturn]] void end_all(Communicator& world, const std::string& what) {
  print_error(concat("rank ", world.rank(), " of ", world.size(), " on host ", host_name(), ": ", what, '\n'));
  world.abort(kFailed);
  std::_Exit(kFailed);
}

}  // namespace

int run(const std::function<void(Communicator& world)>& f) {
  Communicator* world = nullptr;
  try {
    check(static_cast<bool>(f), "parallel::run", "the function is empty");
    world = &mpi_world();
    f(*world);
    mpi_finalize();
    return 0;
  } catch (const CollectiveError& error) {
    // Meanwhile the reporter ends this rank, too.
    if (world->rank() != error.reporter()) std::this_thread::sleep_for(std::chrono::seconds(5));
    end_all(*world, error.what());
  } catch (const std::exception& error) {
    if (world) end_all(*world, error.what());
    print_error(concat(error.what(), '\n'));
  } catch (...) {
    if (world) end_all(*world, "an exception of an unknown type");
    print_error("parallel::run: an exception of an unknown type\n");
  }
  return kFailed;
}

}  // namespace voxgrad::parallel
