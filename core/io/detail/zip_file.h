// The directory of a zip archive whose entries are not compressed, for core/io/pt.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "input_file.h"

namespace voxgrad {

class ZipFile {
 public:
  struct Entry {
    int64_t header = 0;  ///< position of the local header
    int64_t size = 0;    ///< bytes in the archive
    bool stored = true;  ///< true if the entry is neither compressed nor encrypted
  };
  /// A range of bytes of the file.
  struct Range {
    int64_t position = 0;
    int64_t size = 0;
  };

  /// Reads the directory. Keeps a reference to `file`. Throws Error if `file` is not a zip archive or is
  /// truncated, if two entries have the same name, or if all entries together are larger than the file.
  explicit ZipFile(const InputFile& file);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  /// Returns the range of the contents of an entry. Throws if there is no such entry, if it is compressed, or if it
  /// does not lie within the file.
  Range find(const std::string& name) const;

 private:
  Range find_directory(uint64_t& count) const;
  size_t add_entry(std::string_view record);

  const InputFile& file_;
  std::map<std::string, Entry> entries_;
  int64_t total_ = 0;  ///< bytes of all entries
};

}  // namespace voxgrad
