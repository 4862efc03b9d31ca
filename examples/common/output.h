// Where results go: a folder of one's own, and a standard output that nobody may be reading.
#pragma once

#include <filesystem>

namespace examples {

/// Whether standard output takes a few lines now. Where it is a pipe that is full, writing would wait for the reader.
bool output_ready();

/// A folder for the results of one run at a time, made if it is not there.
class OutputFolder {
 public:
  /// Throws voxgrad::Error if another run is using it. A file .lock stays in it; it is free when the process has ended,
  /// in whichever way.
  explicit OutputFolder(std::filesystem::path path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Throws voxgrad::Error if file `name` could not be written there.
  void check_writable(const char* name) const;

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace examples
