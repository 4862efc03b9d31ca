// What run() and launch() share.
#pragma once

#include <functional>

#include "communicator.h"

namespace voxgrad::parallel {

/// f(world); an exception ends all processes, after one line on stderr.
void run_guarded(Communicator& world, const std::function<void(Communicator& world)>& f);

}  // namespace voxgrad::parallel
