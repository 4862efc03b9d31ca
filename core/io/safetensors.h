// The safetensors format (https://github.com/huggingface/safetensors): an 8-byte little-endian header
// length, a JSON header with dtype, shape and byte range of each tensor, then the elements. Nothing in it
// can run code.
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
  /// Leaves out tensors of dtypes that voxgrad does not have (I8, I16, U16, U32, U64, C64, F8_*, F6_*, F4), which
  /// otherwise are an error.
  bool skip_unsupported = false;
  /// If the tensors to be loaded by one call take more, or the header does, nothing is loaded and Error thrown.
  int64_t max_bytes = INT64_MAX;
};

/// What a file says of one of its tensors.
struct SafetensorsEntry {
  std::string dtype;  ///< as the format names it: "F32", "BF16", "I8", "F8_E4M3", ...
  Shape shape;
  int64_t begin = 0, end = 0;       ///< its bytes, counted from the first tensor's
  std::optional<DType> loads_as{};  ///< empty for a dtype that voxgrad does not have
};

class InputFile;

/// A file open for reading: what is in it is known at once, tensors are read when they are asked for. Not for use from
/// several threads at once.
class SafetensorsFile {
 public:
  /// Reads the header. `op` begins the error messages. Throws Error if the file cannot be read or breaks a rule of the
  /// format: header length (at most 100 MB, within the file), JSON, unknown or repeated keys, unknown dtype, more than
  /// 8 axes, sizes that overflow, ranges that differ from shape x dtype, overlap, leave a hole or do not end with the
  /// file.
  explicit SafetensorsFile(const std::filesystem::path& path, const LoadSafetensorsOptions& options = {},
                           const char* op = "SafetensorsFile");
  ~SafetensorsFile();

  /// All tensors, those that cannot be loaded too.
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  /// Whether the file was saved with a checksum.
  bool has_checksum() const { return checksum_.has_value(); }

  /// One tensor, contiguous. Throws if there is none of this name, if its dtype is not supported, if it takes more than
  /// max_bytes, and for a bool other than 0 or 1. The checksum, which is one of the whole file, is not looked at.
  Tensor load(const std::string& name, Device device = Device::cpu());
  /// All of them; throws also if the file was saved with a checksum and its contents have another one (unless a tensor
  /// was skipped: then nobody knows).
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

/// All tensors of the file, contiguous, on `device`; its metadata in `*metadata` if that is given. Throws as
/// SafetensorsFile and its load_all() do. All but the elements is checked before memory for a tensor is taken.
TensorMap load_safetensors(const std::filesystem::path& path, Device device = Device::cpu(),
                           Metadata* metadata = nullptr, const LoadSafetensorsOptions& options = {});

struct SaveSafetensorsOptions {
  /// Adds a checksum, which loading verifies: zlib's CRC-32 of all names, dtypes, shapes, elements and metadata, as
  /// "voxgrad.crc32" of the file's metadata, where only other programs see it.
  bool checksum = false;
};

/// Writes `tensors`, one at least, from any device and with any strides, atomically. Names and metadata are UTF-8; no
/// tensor is named
/// "__metadata__", no metadata "voxgrad.crc32".
void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata = {},
                      const SaveSafetensorsOptions& options = {});

}  // namespace voxgrad
