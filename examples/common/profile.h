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
           "(default file: trace.json)")
        ->type_name("FILE")
        ->expected(0, 1)
        ->default_str("trace.json")
        ->check(not_empty());
  }

  /// Writes the trace to `file`. If `file` is empty, the profiler does nothing.
  explicit StepProfiler(std::string file) : file_(std::move(file)) {}

  /// Starts the recording before step kWarmup (counted from 0) and ends the recording after kSteps steps. Call this
  /// function before each step.
  void begin_step() {
    if (file_.empty()) return;
    if (step_ == kWarmup + kSteps) finish();
    if (step_++ == kWarmup) session_ = std::make_unique<voxgrad::profiler::Session>();
  }
  /// Ends the recording, prints the tables and writes the trace. Does nothing if no recording is running. Call this
  /// function after the last step.
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
