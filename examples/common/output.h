// Destinations of a program's results: a folder that one run uses at a time, and standard output.
#pragma once

#include <filesystem>

namespace examples {

/// Whether a few lines can be written to standard output now. Writing to a full pipe would wait for the reader.
bool output_ready();

/// A folder for the results of one run at a time.
class OutputFolder {
 public:
  /// Creates the folder if it does not exist and locks it until the object or the process ends. Throws voxgrad::Error
  /// if another run has locked it. The lock is on the folder itself, so removing files from the folder does not release
  /// it; on a file system that cannot lock folders (NFS) it is on a file .lock.
  explicit OutputFolder(std::filesystem::path path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Throws voxgrad::Error if a file called `name` cannot be written in the folder.
  void check_writable(const char* name) const;

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace examples
