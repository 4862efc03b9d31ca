// The report of a run: a Markdown page with Dice tables and pictures.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/segment/task.h"
#include "examples/segment/train.h"

namespace segment {

/// The Dice coefficients of a predicted case.
struct TestResult {
  std::string name;
  std::vector<double> dice;      ///< per class; empty if the case has no label
  std::vector<double> baseline;  ///< per class; empty if the task has no baseline
};

/// Returns the name of a case and its role in the task: "right half, mirrored (test)".
std::string title(const Task& task, const TestResult& test);

/// Returns a Markdown table with the Dice of each scored class. If there is a baseline, the table has a column for the
/// Dice of the baseline.
std::string dice_table(const Task& task, const TestResult& test);

/// Writes the report as a Markdown page. The page shows pictures of the same folder: curves.png, and file_name(name) +
/// ".png" for each test with a label. This function does not create the pictures.
void write_report(const std::filesystem::path& path, const Task& task, const TrainResult& trained,
                  const std::vector<TestResult>& tests, const std::string& device);

/// Replaces each character of a name that is neither a letter nor a digit by a dash.
std::string file_name(const std::string& name);

}  // namespace segment
