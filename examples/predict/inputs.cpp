// Finds the cases that the program predicts, and chooses the names of their results.
#include "examples/predict/inputs.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <map>

#include <voxgrad.h>

namespace predict {
namespace fs = std::filesystem;
namespace vg = voxgrad;
namespace {

constexpr const char* kOp = "predict";

std::string ending_of(const fs::path& path) {
  for (const char* ending : {".nii.gz", ".nii"})
    if (path.string().ends_with(ending)) return ending;
  return {};
}

std::string without_ending(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.substr(0, name.size() - ending_of(path).size());
}

/// Returns the channel number at the end of a name such as CASE_0012, or -1 if `name` does not end with "_" and four
/// digits.
int channel_of(const std::string& name) {
  if (name.size() < 6 || name[name.size() - 5] != '_') return -1;
  const std::string digits = name.substr(name.size() - 4);
  if (!std::ranges::all_of(digits, [](unsigned char c) { return std::isdigit(c); })) return -1;
  return std::stoi(digits);
}

/// Returns the cases in a folder: for the name of each case, a map from channel numbers to files.
std::map<std::string, std::map<int, fs::path>> scan(const fs::path& folder, const std::string& ending) {
  std::map<std::string, std::map<int, fs::path>> cases;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = without_ending(entry.path());
    if (!entry.is_regular_file() || name.starts_with('.') || ending_of(entry.path()) != ending) continue;
    const int channel = channel_of(name);
    vg::check(channel >= 0, kOp, "'", entry.path().string(), "' must have a name like CASE_0000", ending);
    cases[name.substr(0, name.size() - 5)][channel] = entry.path();
  }
  return cases;
}

/// Throws if no files can be written to the folder, or if the folder does not exist and cannot be created.
void check_folder(const fs::path& folder) {
  fs::path existing = fs::absolute(folder).lexically_normal();
  while (!fs::exists(existing) && existing.has_parent_path()) existing = existing.parent_path();
  vg::check(fs::is_directory(existing) && access(existing.c_str(), W_OK | X_OK) == 0, kOp,
            "cannot write to the output folder '", folder.string(), "'");
}

std::vector<Job> jobs_of_folder(const fs::path& folder, const fs::path& output, size_t channels,
                                const std::string& ending) {
  vg::check(ending_of(output).empty(), kOp, "the input is a folder, so the output must be a folder, got '",
            output.string(), "'");
  std::vector<Job> jobs;
  for (const auto& [name, files] : scan(folder, ending)) {
    Job job{name, {}, output / (name + ending)};
    for (const auto& [channel, path] : files) {
      vg::check(static_cast<size_t>(channel) == job.images.size(), kOp, "case '", name, "' in '", folder.string(),
                "' has no channel ", job.images.size());
      job.images.push_back(path);
    }
    vg::check(job.images.size() == channels, kOp, "case '", name, "' in '", folder.string(), "' must have ", channels,
              channels == 1 ? " file" : " files", ", one per channel of the model, found ", job.images.size());
    jobs.push_back(std::move(job));
  }
  vg::check(!jobs.empty(), kOp, "'", folder.string(), "' has no files with names like CASE_0000", ending);
  return jobs;
}

}  // namespace

std::vector<Job> list_jobs(const std::vector<fs::path>& inputs, const fs::path& output, size_t channels,
                           const std::string& file_ending) {
  for (const fs::path& input : inputs) vg::check(fs::exists(input), kOp, "'", input.string(), "' does not exist");
  std::vector<Job> jobs;
  if (inputs.size() == 1 && fs::is_directory(inputs[0])) {
    jobs = jobs_of_folder(inputs[0], output, channels, file_ending);
  } else {
    vg::check(inputs.size() == channels, kOp, "the model needs ", channels, channels == 1 ? " file" : " files",
              ", one per channel, got ", inputs.size());
    std::string name = without_ending(inputs[0]);
    if (channel_of(name) == 0) name.resize(name.size() - 5);
    const bool is_file = !ending_of(output).empty() && !fs::is_directory(output);
    jobs.push_back({name, inputs, is_file ? output : output / (name + file_ending)});
  }
  for (const Job& job : jobs) {
    check_folder(job.output.has_parent_path() ? job.output.parent_path() : fs::path("."));
    const bool is_input = std::ranges::any_of(job.images, [&](const fs::path& image) {
      std::error_code error;
      return fs::equivalent(image, job.output, error);
    });
    vg::check(!is_input, kOp, "the output '", job.output.string(), "' would replace an input");
  }
  return jobs;
}

fs::path beside(const Job& job, const std::string& suffix) {
  return job.output.parent_path() / (without_ending(job.output) + suffix);
}

}  // namespace predict
