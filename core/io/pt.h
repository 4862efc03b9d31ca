// Reads checkpoints that torch.save wrote: zip archives with a pickle and the elements of each storage. A pickle is a
// program; this reader interprets only the instructions that build data, and never runs Python code.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "safetensors.h"

namespace voxgrad {

/// Options of open_pt and load_pt.
struct PtOptions {
  /// Maximum size of the pickle, of each tensor, and of all storages that one call loads. If a size exceeds the limit,
  /// Error is thrown before memory is allocated.
  int64_t max_bytes = INT64_MAX;
};

struct PtFile;

/// A value in a checkpoint. The file stays open as long as one of its values exists. A function throws Error if
/// the value does not have the kind that the function expects. The message contains the file, the path of keys, and
/// both kinds. Several threads may use values of one file.
class PtValue {
 public:
  /// NumPy scalars are boolean, integer or number; torch.Size is a tuple; torch.device and dtypes are text ("cuda:0",
  /// "torch.float32"); OrderedDict is a dict, and Parameter is a tensor. All other classes and functions, sets,
  /// integers of more than 64 bits and NumPy arrays are objects, whose contents are discarded.
  enum class Kind : uint8_t { none, boolean, integer, number, text, bytes, list, tuple, dict, tensor, object };

  Kind kind() const;
  bool is_none() const { return kind() == Kind::none; }
  bool boolean() const;
  int64_t integer() const;
  /// Returns a number or an integer.
  double number() const;
  /// Returns a text, which is UTF-8 if Python wrote the file, or bytes.
  const std::string& text() const;
  /// Returns the items of a list or tuple.
  std::vector<PtValue> items() const;
  /// Returns the keys and values of a dict in the order of the file.
  std::vector<std::pair<PtValue, PtValue>> members() const;
  /// Returns the value of a text key of a dict. Throws if the key is missing.
  PtValue at(std::string_view key) const;
  /// Returns the value of a text key of a dict, or a value of Kind::none if the key is missing.
  PtValue find(std::string_view key) const;
  /// Reads a tensor on the CPU. The tensor shares memory with all existing tensors that share its storage in the file,
  /// as in PyTorch. The tensor has the strides of the file and does not require grad. Throws for dtypes that voxgrad
  /// does not support, more than 8 axes, and bools other than 0 and 1.
  Tensor tensor() const;
  /// Returns all tensors below this value by dotted names: text keys, integer keys and list indices joined by '.'. The
  /// name of a tensor itself is "". A container that contains itself is not entered again. Throws if tensor() throws
  /// for one of the tensors, if two names are equal, or if a key above a tensor is neither text nor integer. Also
  /// throws for more than 1000 levels, 10^6 tensors, 10^7 values or 64 MB of names.
  TensorMap tensors() const;

 private:
  friend PtValue open_pt(const std::filesystem::path& path, const PtOptions& options);
  PtValue(std::shared_ptr<const PtFile> file, uint32_t node, std::string path)
      : file_(std::move(file)), node_(node), path_(std::move(path)) {}
  PtValue child(uint32_t node, std::string_view key) const;
  std::optional<uint32_t> lookup(std::string_view key) const;
  void expect(bool condition, const char* expected) const;

  std::shared_ptr<const PtFile> file_;
  uint32_t node_;
  std::string path_;  ///< for error messages
};

/// Returns the value that was passed to torch.save (PyTorch 1.6 or newer, pickle protocols 1 to 5). PtValue::tensor()
/// and PtValue::tensors() read the tensors. Throws Error for files of older versions, TorchScript archives, compressed
/// archives and big-endian elements. Also throws if the pickle is malformed, is larger than 256 MB, or has more than 4
/// million values or 10^6 tensors. Checksums of the archive are not verified, because PyTorch does not always write
/// them.
PtValue open_pt(const std::filesystem::path& path, const PtOptions& options = {});

/// Returns all tensors of a checkpoint on `device`, with the names of PtValue::tensors(). Tensors that share a storage
/// share memory. Throws as open_pt() and tensors() do, and if the file is a single object, such as a module.
TensorMap load_pt(const std::filesystem::path& path, Device device = Device::cpu(), const PtOptions& options = {});

}  // namespace voxgrad
