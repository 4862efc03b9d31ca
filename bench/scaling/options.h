// Command-line options of the benchmark bench/scaling.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scaling {

/// The options, described by `scaling --help`.
struct Options {
  std::vector<std::string> what{"step"};
  int gpus = 1;
  bool launcher = false;  ///< true if the ranks are processes that mpirun or torchrun started
  std::vector<std::string> modes{"bf16"}, schemes{"ddp"};
  bool graph = false;  ///< also measure the step as a CUDA graph
  std::string wire = "f32";
  double bucket_mb = 25;
  int64_t batch = 2, size = 128;
  int64_t depth = 0;  ///< depth of the volume of --what spatial, in voxels; 0: same as size
  int warmup = 3, rounds = 3, steps = 20;
  std::string trace;

  // Options of --simulate:
  std::vector<int> simulate;
  std::string algorithm = "tree";
  double latency_us = 5;   ///< per step of the algorithm
  double bandwidth = 300;  ///< bus bandwidth in GB/s
  int blocks = 16;         ///< CTAs that a reduction occupies
};

}  // namespace scaling
