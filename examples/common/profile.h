// --profile: what some of the steps spend their time on.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>

#include "examples/common/options.h"

namespace examples {

/// Records a few training steps after the first ones, which allocate and set up.
class StepProfiler {
 public:
  static constexpr int64_t kWarmup = 2, kSteps = 5;

  static void add_option(CLI::App& app, std::string& file) {
    app.add_option(
           "--profile", file,
           "print what operators and modules of some steps take, and write a trace for ui.perfetto.dev (default: "
           "trace.json)")
        ->type_name("FILE")
        ->expected(0, 1)
        ->default_str("trace.json")
        ->check(not_empty());
  }

  /// Nothing is recorded if `file` is empty.
  explicit StepProfiler(std::string file) : file_(std::move(file)) {}

  /// Before each step.
  void begin_step() {
    if (file_.empty()) return;
    if (step_ == kWarmup + kSteps) finish();
    if (step_++ == kWarmup) session_ = std::make_unique<voxgrad::profiler::Session>();
  }
  /// After the last one: prints, if that is still to be done.
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
