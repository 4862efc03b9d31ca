// Files that appear whole or not at all: checkpoints and results survive a crash, a full disk or a Ctrl-C
// in the middle of a write, because the old file stays in place until the new one is safe on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

namespace voxgrad {

/// A file being written beside `path`, which takes its name in commit(). Without a commit() nothing
/// happens to `path`, and the temporary file ".<name>.voxgrad-<number>.tmp" is removed: by the destructor, or, if
/// the process was killed, by the next AtomicFile of the same path. That of a writer still at work is never touched.
class AtomicFile {
 public:
  /// Creates the temporary file in the directory of `path`; a symbolic link is followed. `op` begins the
  /// error messages. Throws if the directory is missing or not writable, or if `path` is a directory,
  /// a device or a file that may not be written.
  AtomicFile(const std::filesystem::path& path, const char* op);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Writes at the end of what was written before. Throws if the disk is full or fails.
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Goes to `position` bytes from the start, to write there again.
  void seek(int64_t position);
  /// The open file, for libraries that write by themselves.
  int descriptor() const { return descriptor_; }
  /// Forces the bytes to the disk and gives the file its name.
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

/// Replaces the file `path` by `bytes`, or leaves it as it was and throws.
void write_file(const std::filesystem::path& path, std::string_view bytes, const char* op = "write_file");

}  // namespace voxgrad
