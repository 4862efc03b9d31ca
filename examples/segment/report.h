// The report of a run: a page with figures and pictures.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/segment/task.h"
#include "examples/segment/train.h"

namespace segment {

/// The result of a predicted case.
struct TestResult {
  std::string name;
  std::vector<double> dice;      ///< of each class; empty if the case has no label
  std::vector<double> baseline;  ///< of each class; empty if there is none
};

/// "right half, mirrored (test)": the case and what its Dice is.
std::string title(const Task& task, const TestResult& test);

/// A Markdown table with the Dice of each structure beside the baseline's.
std::string dice_table(const Task& task, const TestResult& test);

/// Writes a Markdown page. It shows pictures in the same folder: curves.png and file_name(name) + ".png" of each test.
void write_report(const std::filesystem::path& path, const Task& task, const TrainResult& trained,
                  const std::vector<TestResult>& tests, const std::string& device);

/// The name with each character other than letters and digits replaced by a dash.
std::string file_name(const std::string& name);

}  // namespace segment
