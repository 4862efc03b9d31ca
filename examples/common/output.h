// Destinations of a program's results: a locked folder, and standard output.
#pragma once

#include <filesystem>

namespace examples {

/// Returns true if a few lines can be written to standard output without blocking. Returns false if standard output is
/// a pipe that is full, because its reader is slow or stopped.
bool output_ready();

/// Creates a folder and its missing parents. Flushes the entries of new folders to the disk, so that files in the
/// folder survive a loss of power. Throws std::filesystem::filesystem_error or voxgrad::Error.
void create_folder(const std::filesystem::path& path);

/// A folder for results, locked so that only one run can use it at a time.
class OutputFolder {
 public:
  /// Creates the folder if it does not exist and locks it until the object or the process ends. Throws voxgrad::Error
  /// if another run has locked it. The lock is on the folder itself, so that deleting files in the folder does not
  /// release the lock. On a file system that cannot lock folders (NFS), a file named .lock is locked instead. On a file
  /// system without locks, nothing is locked.
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
