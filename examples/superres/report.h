// What a run leaves behind: pictures, losses, figures.
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

struct RunSummary {
  std::string title;     ///< says so if the data is a phantom
  std::string training;  ///< what was trained on
  std::string device;
  int64_t parameters = 0, steps = 0, batch = 0, patch = 0;
  double train_seconds = 0, test_seconds = 0, last_loss = 0;
  std::vector<TestResult> tests;
};

/// The middle axial, coronal and sagittal slices, a row each, front or top upwards and the subject's right (in the
/// sagittal slice the front) to the right: input (enlarged), trilinear, ours, truth, and the error of ours,
/// five times amplified.
void write_slices(const std::filesystem::path& path, const TestResult& test);

/// "step,loss,learning_rate" and a line for each step.
struct LossLine {
  int64_t step;
  double loss, lr;
};
void write_losses(const std::filesystem::path& path, const std::vector<LossLine>& lines);
/// Reads back what write_losses wrote, for a resumed run.
std::vector<LossLine> read_losses(const std::filesystem::path& path);

/// A Markdown page with the figures and the pictures.
void write_report(const std::filesystem::path& path, const RunSummary& summary);

}  // namespace superres
