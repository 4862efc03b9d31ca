// Benchmark of training on several GPUs. Measures the time of whole steps, the time of reductions, and the fraction of
// the reductions that overlaps with the backward pass.
//
//   scaling --gpus 2 --what step allreduce overlap --modes bf16 high --graph
//   mpirun -n 16 scaling --launcher --what step
//   scaling --simulate 8 64 1024 --latency 8.5 --bandwidth 340 --what buckets step
//
// The last command uses a single GPU and simulates runs on 8, 64 and 1024 GPUs. The network is nnU-Net's standard U-Net
// of six stages (docs/performance.md). --batch is the number of patches per step on each GPU. The program prints a line
// of JSON immediately after each measurement.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>

#include "bench/scaling/bench.h"
#include "bench/scaling/kernels.h"
#include "bench/scaling/simulated.h"
#include "cuda/cuda.h"
#include "examples/common/options.h"
#include "nn/distributed/run.h"
#include "ops/create.h"

namespace {
namespace vg = voxgrad;
using namespace scaling;

const std::map<std::string, void (*)(const Bench&)> kMeasurements{
    {"step", measure_step},       {"overlap", measure_overlap},
    {"buckets", measure_buckets}, {"allreduce", measure_all_reduce},
    {"spatial", measure_spatial},
};

/// Adds --simulate and the options that need it.
void add_simulation(CLI::App& app, Options& options) {
  auto* const simulate =
      app.add_option(
             "--simulate", options.simulate,
             "numbers of GPUs to simulate on one GPU; simulated reductions take as long as real reductions would")
          ->check(CLI::Range(2, 1 << 20));
  app.add_option("--algorithm", options.algorithm,
                 "algorithm of a simulated reduction over n GPUs: tree has 2 ceil(log2 n) steps, ring has 2 (n - 1)")
      ->check(CLI::IsMember({"tree", "ring"}))
      ->capture_default_str()
      ->needs(simulate);
  app.add_option("--latency", options.latency_us, "microseconds per step of the algorithm")
      ->check(examples::number_in(0, 1e9))
      ->capture_default_str()
      ->needs(simulate);
  app.add_option("--bandwidth", options.bandwidth, "bus bandwidth of a simulated reduction in GB/s")
      ->check(examples::number_in(1e-6, 1e9))
      ->capture_default_str()
      ->needs(simulate);
  app.add_option("--blocks", options.blocks, "number of thread blocks of a simulated reduction")
      ->check(CLI::Range(1, 132))
      ->capture_default_str()
      ->needs(simulate);
}

/// Reads the command line. Returns -1 if the program should continue, otherwise its exit code.
int parse(int argc, char** argv, Options& options) {
  CLI::App app{"Benchmark of training on several GPUs: steps, reductions, and their overlap"};
  std::vector<std::string> names;
  for (const auto& [name, measure] : kMeasurements) names.push_back(name);
  app.add_option("--what", options.what, "measurements to run, in this order")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  auto* const gpus = app.add_option("--gpus", options.gpus, "use the first N GPUs, with one thread per GPU")
                         ->check(CLI::Range(1, 1024))
                         ->capture_default_str();
  auto* const launcher = app.add_flag("--launcher", options.launcher, "use the ranks that mpirun or torchrun started");
  app.add_option("--modes", options.modes, "bf16 (autocast), high (TF32), highest (float32)")
      ->check(CLI::IsMember({"bf16", "high", "highest"}))
      ->capture_default_str();
  app.add_option("--schemes", options.schemes,
                 "ddp (DataParallel), zero (DataParallel with ZeroRedundancy), none (independent GPUs)")
      ->check(CLI::IsMember({"ddp", "zero", "none"}))
      ->capture_default_str();
  app.add_flag("--graph", options.graph, "also measure the step as a CUDA graph (except for zero)");
  app.add_option("--wire", options.wire, "dtype of the gradients in reductions")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  app.add_option("--bucket-mb", options.bucket_mb, "size of a bucket in MiB")
      ->check(examples::number_in(1e-6, 1e6))
      ->capture_default_str();
  app.add_option("--batch", options.batch, "patches per step on each GPU")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--size", options.size, "voxels along a patch's side, a multiple of 32")
      ->check(CLI::Range(64, 512))
      ->capture_default_str();
  app.add_option("--depth", options.depth,
                 "with --what spatial: voxels along D of the volume that is divided among the ranks (default: --size)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--warmup", options.warmup, "steps before each measurement")->check(CLI::Range(1, 1000));
  app.add_option("--rounds", options.rounds, "rounds of each measurement; the median is reported")
      ->check(CLI::Range(1, 1000));
  app.add_option("--steps", options.steps, "steps per round")->check(CLI::Range(2, 10000))->capture_default_str();
  app.add_option("--trace", options.trace, "write a profiler trace of three eager steps of all GPUs to this file");
  add_simulation(app, options);
  launcher->excludes(gpus)->excludes("--simulate");
  gpus->excludes("--simulate");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return -1;
}

void measure(const Options& options, vg::distributed::Communicator& world, ordered_json about) {
  about["gpu"] = gpu_name(world.device().index);
  about["ranks"] = world.size();
  about["batch"] = options.batch;
  about["size"] = options.size;
  const Bench bench{options, world, std::move(about)};
  for (const std::string& what : options.what) kMeasurements.at(what)(bench);
}

int run(const Options& options) {
  const auto real = [&](vg::distributed::Communicator& world) { measure(options, world, {}); };
  if (options.launcher) return vg::distributed::run(real, vg::Device::cuda());
  if (options.simulate.empty()) return vg::distributed::launch(options.gpus, real);
  vg::distributed::set_environment();
  vg::check(vg::cuda::is_available(), "scaling", "--simulate needs a GPU");
  for (const int ranks : options.simulate) {
    SimulatedCommunicator world(vg::Device::cuda(), {.ranks = ranks,
                                                     .algorithm = options.algorithm,
                                                     .latency_us = options.latency_us,
                                                     .bandwidth = options.bandwidth,
                                                     .blocks = options.blocks});
    measure(options, world,
            {{"simulated", true},
             {"algorithm", options.algorithm},
             {"latency_us", options.latency_us},
             {"bandwidth", options.bandwidth},
             {"blocks", options.blocks}});
  }
  return 0;
}

}  // namespace

namespace scaling {

void Bench::report(const char* what, const ordered_json& row) const {
  if (world.rank() != 0) return;
  ordered_json line{{"what", what}};
  line.update(about);
  line.update(row);
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

std::vector<double> Bench::gather(double value) const {
  return world.all_gather(vg::full({}, value, {.dtype = vg::f64})).to_vector();
}

}  // namespace scaling

int main(int argc, char** argv) {
  Options options;
  if (const int code = parse(argc, argv, options); code >= 0) return code;
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
