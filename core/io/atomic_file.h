// AtomicFile: replaces a file completely or not at all. Checkpoints and results survive a crash, a full disk or a
// Ctrl-C during a write, because the old file stays in place until the new one is on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "../noncopyable.h"

namespace voxgrad {

/// A temporary file ".<name>.voxgrad-<number>.tmp" beside `path` that commit() renames to `path`. Without commit(),
/// `path` does not change, and the destructor removes the temporary file. If a process is killed, its temporary file
/// remains until the next AtomicFile of the same path removes the file. Temporary files of running writers are never
/// removed.
class AtomicFile : NonCopyable {
 public:
  /// Creates the temporary file in the directory of `path`. Follows symbolic links. `op` is the prefix of error
  /// messages. Throws Error if the directory does not exist or is not writable, or if `path` is a directory, a device
  /// or a file that may not be written.
  AtomicFile(const std::filesystem::path& path, const char* op);
  ~AtomicFile();

  /// Writes at the current position. Throws Error if the disk is full or fails.
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Sets the position, in bytes from the start, to overwrite earlier bytes.
  void seek(int64_t position);
  /// Returns the file descriptor, for libraries that write to it themselves.
  int descriptor() const { return descriptor_; }
  /// Flushes the bytes to the disk and renames the file to `path`.
  void commit();

 private:
  [[noreturn]] void fail_with(int error) const;
  void create_temporary();
  void discard() noexcept;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  const char* op_;
  int descriptor_ = -1;
};

/// Replaces the contents of the file `path` atomically. If the function throws, the file is unchanged.
void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op = "write_file");

}  // namespace voxgrad
