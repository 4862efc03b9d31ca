// Converts a pickle to values without executing any Python code, for core/io/pt.cpp.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../pt.h"
#include "zip_file.h"

namespace voxgrad {

struct PickledStorage {
  std::string key;  ///< name of the entry in the archive, after the folder "data/"
  std::string type;
  std::optional<DType> dtype{};  ///< empty if voxgrad does not support the type
  int64_t numel = 0;
  ZipFile::Range range{};  ///< bytes in the archive; empty if `dtype` is empty
};

/// A tensor. Unless there is a problem, its elements lie within its storage.
struct PickledTensor {
  uint32_t storage = 0;  ///< index into PickledGraph::storages
  int64_t offset = 0;    ///< in elements
  Shape shape{};
  Strides strides{};
  std::string problem{};  ///< the reason why the tensor cannot be loaded, or ""
};

/// A value. Values refer to each other by index, so shared and cyclic values are destroyed without recursion.
struct PickledNode {
  /// The role of an object.
  enum class Role : uint8_t { plain, global, storage, numpy_dtype };

  PtValue::Kind kind = PtValue::Kind::none;
  Role role = Role::plain;
  uint32_t detail = 0;  ///< for a storage: index into `storages`; for a NumPy dtype: index of the node of its type code
  /// The value of a boolean or integer, or the bits of a number. For a text, for bytes and for the class name of an
  /// object, the index into `texts`. For a tensor, the index into `tensors`.
  int64_t value = 0;
  std::vector<uint32_t> children{};  ///< items, or alternating keys and values
};

struct PickledGraph {
  uint32_t root = 0;
  std::vector<PickledNode> nodes;  ///< the first node is None
  std::deque<std::string> texts;
  std::vector<PickledStorage> storages;
  std::vector<PickledTensor> tensors;

  /// Returns the contents of a text or bytes, or the class name of an object.
  const std::string& text(uint32_t node) const { return texts[static_cast<size_t>(nodes[node].value)]; }
  /// Returns "a dict", "an object of class 'x'", ... for messages.
  std::string describe(uint32_t node) const;
};

inline constexpr size_t kMaxPickledTensors = 1'000'000;

/// Interprets a pickle. Storages are entries of `zip` that begin with `folder`, which ends with '/'. Throws Error if
/// the pickle is malformed or exceeds a limit that open_pt() documents.
PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle);

}  // namespace voxgrad
