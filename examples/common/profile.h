// The option --profile, which profiles a few training steps.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>

#include "examples/common/options.h"

namespace examples {

/// Profiles kSteps training steps. Skips the first kWarmup steps, which allocate memory and load kernels.
class StepProfiler {
 public:
  static constexpr int64_t kWarmup = 2, kSteps = 5;

  /// Adds --profile. `file` stays empty if the option is not given.
  static void add_option(CLI::App& app, std::string& file) {
    app.add_option(
           "--profile", file,
           "print the time that operators and modules take in a few steps, and write a trace for ui.perfetto.dev "
           "(default: trace.json)")
        ->type_name("FILE")
        ->expected(0, 1)
        ->default_str("trace.json")
        ->check(not_empty());
  }

  /// Writes the trace to `file`. If `file` is empty, the profiler does nothing.
  explicit StepProfiler(std::string file) : file_(std::move(file)) {}

  /// Must be called before each step. Starts and stops the recording.
  void begin_step() {
    if (file_.empty()) return;
    if (step_ == kWarmup + kSteps) finish();
    if (step_++ == kWarmup) session_ = std::make_unique<voxgrad::profiler::Session>();
  }
  /// Must be called after the last step. Prints the tables and writes the trace if this has not been done yet.
  void finish() {
    if (!session_) return;
    session_->stop();
    std::cout << '\n'
              << session_->table() << '\n'
              << session_->table(voxgrad::profiler::GroupBy::module, 20) << "trace of " << step_ - kWarmup
              << " steps in " << file_ << '\n';
    session_->save_trace(file_);
    session_.reset();
  }

 private:
  std::string file_;
  int64_t step_ = 0;
  std::unique_ptr<voxgrad::profiler::Session> session_;
};

}  // namespace examples
