// Benchmark of training steps on CPUs: one process with several threads, compared with MPI ranks that have one thread
// each and share the batch. The program trains a U-Net of three stages on patches of 48^3 voxels in float32. It times
// several rounds of steps and prints the median over the rounds, in milliseconds per step.
//
//   VOXGRAD_NUM_THREADS=2 build/release/bench/cpu_ranks
//   mpirun -n 2 -x VOXGRAD_NUM_THREADS=1 build/release/bench/cpu_ranks
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "bench/no_options.h"
#include "core/random.h"
#include "nn/distributed/data_parallel.h"
#include "nn/distributed/run.h"
#include "nn/optim/optimizers.h"
#include "nn/unet.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/loss.h"

namespace {

using namespace voxgrad;

constexpr int64_t kBatch = 2;  // samples per step, summed over all ranks
constexpr int64_t kSize = 48;  // voxels per side of a patch
constexpr int kRounds = 9;     // timed rounds
constexpr int kSteps = 4;      // steps per round

void train(distributed::Communicator& world) {
  check(kBatch % world.size() == 0, "cpu_ranks", "a batch of ", kBatch, " samples cannot be divided among ",
        world.size(), " ranks");
  manual_seed(0);
  nn::UNet model({.num_classes = 3, .stages = {{16}, {32, 3, 2}, {64, 3, 2}}});
  const nn::DataParallel parallel(model, world);
  optim::SGD optimizer(model.parameters(), {.lr = 0.01, .momentum = 0.9});
  const int64_t batch = kBatch / world.size();
  const Tensor x = randn({batch, 1, kSize, kSize, kSize});
  const Tensor target = (x > 0.0).to(i64).select(1, 0);
  const auto step = [&] {
    optimizer.zero_grad();
    deep_supervision_loss(model.levels(x), target).backward();
    optimizer.step();
  };
  step();
  std::vector<double> ms;
  for (int round = 0; round < kRounds; ++round) {
    world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kSteps; ++i) step();
    world.barrier();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    ms.push_back(time.count() / kSteps);
  }
  std::sort(ms.begin(), ms.end());
  if (world.rank() == 0)
    std::printf("%d %s: %.1f ms per step\n", world.size(), world.size() == 1 ? "rank" : "ranks", ms[kRounds / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  take_no_options(argc, argv,
                  "usage: cpu_ranks\n       mpirun -n 2 -x VOXGRAD_NUM_THREADS=1 cpu_ranks\n\n"
                  "Prints the median milliseconds of a training step of a U-Net on the CPU.\n");
  return distributed::run(train);
}
