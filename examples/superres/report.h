// The files that describe a run: losses.csv and the report.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/superres/evaluate.h"

namespace superres {

/// The results on a volume that was not used for training. Tensors are (1, 1, D, H, W) on the CPU.
struct TestResult {
  std::string name;     ///< shown in the table: "ch2.nii.gz, slices 122-179 (held out)"
  std::string label;    ///< part of file names: "held-out"
  voxgrad::Tensor low;  ///< input, at half the resolution of `truth`
  voxgrad::Tensor truth;
  voxgrad::Tensor trilinear;  ///< trilinear interpolation of `low`
  voxgrad::Tensor network;    ///< result of the network for `low`
  Score trilinear_score;
  Score network_score;
};

/// A line of losses.csv.
struct LossLine {
  int64_t step;
  double loss;
  double lr;  ///< learning rate
};

/// The contents of the report.
struct RunSummary {
  std::string title;       ///< heading of the page
  std::string training;    ///< name and slices of the training volume
  std::string device;      ///< device and precision: "cuda:0 in bf16 (autocast)"
  int64_t parameters = 0;  ///< number of parameters of the network
  int64_t steps = 0;
  int64_t batch = 0;  ///< patches per step
  int64_t patch = 0;  ///< low-resolution voxels per side of a patch
  double train_seconds = 0;
  double test_seconds = 0;
  double last_loss = 0;  ///< mean loss of the last 20 steps
  std::vector<LossLine> losses;
  std::vector<TestResult> tests;
};

/// Writes a CSV file with the columns step, loss and learning_rate.
void write_losses(const std::filesystem::path& path, const std::vector<LossLine>& lines);
/// Reads a file that write_losses wrote. Ignores the first damaged line and all lines after it.
std::vector<LossLine> read_losses(const std::filesystem::path& path);

/// Writes a Markdown page with the scores. The page shows pictures of the same folder: LABEL.png for each test and, if
/// there are losses, losses.png. This function does not create the pictures.
void write_report(const std::filesystem::path& path, const RunSummary& summary);

}  // namespace superres
