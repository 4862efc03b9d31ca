// Command-line options of the benchmark bench/scaling.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scaling {

/// The options, which `scaling --help` also describes.
struct Options {
  std::vector<std::string> what{"step"};  ///< measurements to run
  int gpus = 1;
  bool launcher = false;                    ///< true if the ranks are processes that mpirun or torchrun started
  std::vector<std::string> modes{"bf16"};   ///< "bf16", "high", "highest"
  std::vector<std::string> schemes{"ddp"};  ///< "ddp", "zero", "none"
  bool graph = false;                       ///< also measure the step as a CUDA graph
  std::string wire = "f32";                 ///< dtype of the gradients in reductions
  double bucket_mb = 25;                    ///< size of a bucket in MiB
  int64_t batch = 2;                        ///< patches per step on each GPU
  int64_t size = 128;                       ///< voxels along each side of a patch
  int64_t depth = 0;                        ///< depth of the volume of --what spatial, in voxels; 0: same as size
  int warmup = 3;                           ///< steps before each measurement
  int rounds = 3;                           ///< rounds of each measurement; the median is reported
  int steps = 20;                           ///< steps per round
  std::string trace;                        ///< file for a profiler trace; empty: no trace

  // Options of --simulate:
  std::vector<int> simulate;
  std::string algorithm = "tree";
  double latency_us = 5;   ///< per step of the algorithm
  double bandwidth = 300;  ///< bus bandwidth in GB/s
  int blocks = 16;         ///< CTAs that a reduction occupies
};

}  // namespace scaling
