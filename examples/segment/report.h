// What a run leaves behind: a page with figures and pictures.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/segment/task.h"
#include "examples/segment/train.h"

namespace segment {

/// How a held-out case came out.
struct TestResult {
  std::string name;
  std::vector<double> dice, baseline;  ///< of each class; baseline: empty if there is none
};

/// The Dice of each structure of a test beside the baseline's, in Markdown.
std::string dice_table(const Task& task, const TestResult& test);

/// A Markdown page; the pictures that it shows lie beside it (curves.png, of each test its name's file_name() .png).
void write_report(const std::filesystem::path& path, const Task& task, const TrainResult& trained,
                  const std::vector<TestResult>& tests, const std::string& device);

/// The name with what file names may hold.
std::string file_name(const std::string& name);

}  // namespace segment
