// What a run leaves behind: losses and figures.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/superres/evaluate.h"

namespace superres {

/// One test: a volume that was not trained on, and how both methods did.
struct TestResult {
  std::string name;                                  ///< for the table: "ch2.nii.gz, slices 122-179 (held out)"
  std::string label;                                 ///< for file names: "held-out"
  voxgrad::Tensor low, truth, interpolated, result;  ///< (1, 1, D, H, W) on the CPU
  Score trilinear, ours;
};

struct LossLine {
  int64_t step;
  double loss, lr;
};

struct RunSummary {
  std::string title;     ///< says so if the data is a phantom
  std::string training;  ///< what was trained on
  std::string device;    ///< and its precision: "cuda:0 in bf16 (autocast)"
  int64_t parameters = 0, steps = 0, batch = 0, patch = 0;
  double train_seconds = 0, test_seconds = 0, last_loss = 0;
  std::vector<LossLine> losses;
  std::vector<TestResult> tests;
};

/// "step,loss,learning_rate" and a line for each step.
void write_losses(const std::filesystem::path& path, const std::vector<LossLine>& lines);
/// Reads back what write_losses wrote, for a resumed run.
std::vector<LossLine> read_losses(const std::filesystem::path& path);

/// A Markdown page with the figures and the pictures, which lie beside it: of each test LABEL.png, and losses.png if
/// there are losses.
void write_report(const std::filesystem::path& path, const RunSummary& summary);

}  // namespace superres
