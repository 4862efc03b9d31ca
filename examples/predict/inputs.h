// The cases that the program predicts, and the files for their results.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace predict {

/// One case.
struct Job {
  std::string name;                           ///< used in messages
  std::vector<std::filesystem::path> images;  ///< one file per channel
  std::filesystem::path output;               ///< file of the label map
};

/// Lists the cases. `inputs` is either one folder with files CASE_0000.nii.gz (and _0001 and so on for further
/// channels), or one file per channel of a single case. The result of each case of a folder is written to CASE.nii.gz
/// in the folder `output`. The result of a single case is written to the file `output`. If `output` is an existing
/// folder, or if its name does not end with .nii or .nii.gz, the result is written into the folder `output` instead. If
/// `file_ending` is .nii, files in folders end with .nii instead of .nii.gz.
///
/// Throws voxgrad::Error if a file is missing or unexpected, if there is no case, if `output` cannot be written, or if
/// a result would replace an input.
std::vector<Job> list_jobs(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output,
                           size_t channels, const std::string& file_ending);

/// Returns the path of a file next to the label map. Its name is the name of the label map without .nii or .nii.gz,
/// followed by `suffix`.
std::filesystem::path beside(const Job& job, const std::string& suffix);

}  // namespace predict
