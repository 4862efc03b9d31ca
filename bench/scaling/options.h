// What scaling is asked to measure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scaling {

struct Options {
  std::vector<std::string> what{"step"};
  int gpus = 1;
  bool launcher = false;  ///< the ranks are processes that mpirun or torchrun started
  std::vector<std::string> modes{"bf16"}, schemes{"ddp"};
  bool graph = false;  ///< the step as a CUDA graph, too
  std::string wire = "f32";
  double bucket_mb = 25;
  int64_t batch = 2, size = 128;
  int64_t depth = 0;  ///< of the volume of `spatial`; 0: size
  int warmup = 3, rounds = 3, steps = 20;
  std::string trace;

  // Ranks that are not there:
  std::vector<int> simulate;
  std::string algorithm = "tree";
  double latency_us = 5, bandwidth = 300;  ///< of one step of the algorithm; of the bus, in GB/s
  int blocks = 16;
};

}  // namespace scaling
