// Reads and writes the safetensors format (https://github.com/huggingface/safetensors): an 8-byte little-endian header
// length, a JSON header with dtype, shape and byte range of each tensor, then the elements. Files contain no code.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "../tensor.h"

namespace voxgrad {

/// Tensors by name: a state_dict, or the contents of a file.
using TensorMap = std::map<std::string, Tensor>;
/// The "__metadata__" of a safetensors file.
using Metadata = std::map<std::string, std::string>;

/// Options of load_safetensors.
struct LoadSafetensorsOptions {
  /// Maximum number of bytes. The limit applies to the header and, separately, to all tensors together. If either is
  /// larger, Error is thrown before anything is loaded.
  int64_t max_bytes = INT64_MAX;
};

/// Returns all tensors of the file as contiguous tensors on `device`. Stores the metadata of the file in `*metadata`
/// unless `metadata` is null. The header is checked before memory for tensors is allocated. If the file has a checksum,
/// verifies the checksum.
///
/// On the CPU, the tensors are private memory maps of the file, as in the Python package `safetensors`: pages are
/// loaded when they are first used, and are shared with other processes until they are written. Writes to the tensors
/// do not reach the file, and the file may be removed or replaced. A program that instead truncates or overwrites the
/// file in place invalidates the tensors; clone() makes them independent of the file. Verifying a checksum reads all
/// pages.
///
/// Throws Error if the file cannot be read, if its checksum does not match, or if a bool is neither 0 nor 1. Also
/// throws if the header is larger than 100 MB, extends beyond the end of the file or is not valid JSON. The header must
/// not contain unknown or repeated keys, dtypes that voxgrad does not support, more than 8 axes, or sizes that
/// overflow. The byte ranges must match shape and dtype, must not overlap or leave gaps, and must end with the file.
TensorMap load_safetensors(const std::filesystem::path& path, Device device = Device::cpu(),
                           Metadata* metadata = nullptr, const LoadSafetensorsOptions& options = {});

/// The contents of a safetensors file.
struct SafetensorsContents {
  TensorMap tensors;
  Metadata metadata;
  bool has_checksum;  ///< whether the file was saved with a checksum
};
/// Reads a file as load_safetensors() does. `op` is the prefix of error messages.
SafetensorsContents read_safetensors(const std::filesystem::path& path, Device device,
                                     const LoadSafetensorsOptions& options, const char* op);

/// Options of save_safetensors.
struct SaveSafetensorsOptions {
  /// Adds a checksum that loading verifies: the CRC-32 of all names, dtypes, shapes, elements and metadata. The
  /// checksum is stored as the metadata entry "voxgrad.crc32". Functions that load the file do not return this entry.
  bool checksum = false;
};

/// Writes tensors atomically. The tensors may be on any device and have any strides. Throws Error if `tensors` is
/// empty, or if a tensor is undefined or named "__metadata__". Also throws if a name or an entry of `metadata` is not
/// UTF-8, or if a key of `metadata` is "voxgrad.crc32".
void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata = {},
                      const SaveSafetensorsOptions& options = {});

}  // namespace voxgrad
