// Reads and writes the safetensors format (https://github.com/huggingface/safetensors): an 8-byte little-endian header
// length, a JSON header with dtype, shape and byte range of each tensor, then the elements. Files contain no code.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "../tensor.h"

namespace voxgrad {

/// Tensors by name: a state_dict, or the contents of a file.
using TensorMap = std::map<std::string, Tensor>;
/// The "__metadata__" of a safetensors file.
using Metadata = std::map<std::string, std::string>;

struct LoadSafetensorsOptions {
  /// Skips tensors of dtypes that voxgrad does not support (I8, I16, U16, U32, U64, C64, F8_*, F6_*, F4) instead of
  /// throwing Error.
  bool skip_unsupported = false;
  /// Limits the size of the header, and the total size of the tensors that one call loads, in bytes. If a limit is
  /// exceeded, throws Error before anything is loaded.
  int64_t max_bytes = INT64_MAX;
};

/// The description of a tensor in the header of a file.
struct SafetensorsEntry {
  std::string dtype;  ///< name in the format: "F32", "BF16", "I8", "F8_E4M3", ...
  Shape shape;
  int64_t begin = 0, end = 0;       ///< byte range, relative to the end of the header
  std::optional<DType> loads_as{};  ///< empty if voxgrad does not support the dtype
};

class InputFile;

/// An open file. The constructor reads the header; load() reads a tensor. Only one thread may use an object at a time.
class SafetensorsFile {
 public:
  /// Reads the header. `op` is the prefix of error messages. Throws Error if the file cannot be read or violates the
  /// format: a header of more than 100 MB or beyond the end of the file, invalid JSON, unknown or repeated keys, an
  /// unknown dtype, more than 8 axes, sizes that overflow, or byte ranges that do not match shape and dtype, overlap,
  /// leave gaps or do not end with the file.
  explicit SafetensorsFile(const std::filesystem::path& path, const LoadSafetensorsOptions& options = {},
                           const char* op = "SafetensorsFile");
  ~SafetensorsFile();

  /// Returns the descriptions of all tensors of the file, including tensors of unsupported dtypes.
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  /// Returns whether the file was saved with a checksum.
  bool has_checksum() const { return checksum_.has_value(); }

  /// Returns one tensor, contiguous. Throws if the file has no tensor of this name, if its dtype is not supported, if
  /// the tensor is larger than max_bytes, or if a bool is neither 0 nor 1. Does not verify the checksum, which covers
  /// the whole file.
  Tensor load(const std::string& name, Device device = Device::cpu());
  /// Returns all tensors. If the file has a checksum and no tensor is skipped, verifies the checksum and throws if it
  /// does not match.
  TensorMap load_all(Device device = Device::cpu());

 private:
  Tensor read(const std::string& name, const SafetensorsEntry& entry);

  LoadSafetensorsOptions options_;
  std::unique_ptr<InputFile> file_;
  int64_t data_begin_ = 0;
  std::map<std::string, SafetensorsEntry> entries_;
  Metadata metadata_;
  std::optional<std::string> checksum_;
};

/// Returns all tensors of the file, contiguous, on `device`. Stores the metadata of the file in `*metadata` unless
/// `metadata` is null. Throws as SafetensorsFile and load_all() do. The header is checked before memory for tensors is
/// allocated.
TensorMap load_safetensors(const std::filesystem::path& path, Device device = Device::cpu(),
                           Metadata* metadata = nullptr, const LoadSafetensorsOptions& options = {});

struct SaveSafetensorsOptions {
  /// Adds a checksum that loading verifies: the CRC-32 of all names, dtypes, shapes, elements and metadata. It is
  /// stored as metadata "voxgrad.crc32", which voxgrad does not return when it loads the file.
  bool checksum = false;
};

/// Writes tensors atomically. They may be on any device and have any strides. Throws Error if `tensors` is empty, if a
/// tensor is undefined or named "__metadata__", if a name or an entry of `metadata` is not UTF-8, or if a key of
/// `metadata` is "voxgrad.crc32".
void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata = {},
                      const SaveSafetensorsOptions& options = {});

}  // namespace voxgrad
