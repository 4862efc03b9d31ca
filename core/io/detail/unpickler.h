// Builds the values of a pickle, for core/io/pt.cpp. Nothing is executed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../pt.h"
#include "zip_file.h"

namespace voxgrad {

/// A storage that the pickle refers to.
struct PickledStorage {
  std::string_view key;          ///< its entry is <folder>/data/<key>
  uint32_t type = 0;             ///< index of its class name in PickledGraph::texts
  std::optional<DType> dtype{};  ///< empty if voxgrad does not support it
  int64_t numel = 0;
  ZipFile::Range range{};  ///< empty if there is no dtype
};

/// A tensor whose elements lie within its storage.
struct PickledTensor {
  uint32_t storage = 0;  ///< index
  int64_t offset = 0;    ///< in elements
  Shape shape{};
  Strides strides{};
  std::string problem{};  ///< why it cannot be loaded; "" if it can
};

/// A value. Values refer to each other by index, so that shared and cyclic values are destroyed without recursion.
struct PickledNode {
  enum class Role : uint8_t { plain, global, storage, numpy_dtype };
  PtValue::Kind kind = PtValue::Kind::none;
  Role role = Role::plain;  ///< of an object
  uint32_t detail = 0;      ///< index of a storage, or index of the text of a NumPy dtype
  /// The value of a boolean or an integer, the bits of a number, or an index: of a text or bytes in `texts`, of the
  /// class name of an object in `texts`, or of a tensor in `tensors`.
  int64_t value = 0;
  std::vector<uint32_t> children{};  ///< items, or alternating keys and values
};

/// All values of a pickle. Node 0 is None.
struct PickledGraph {
  uint32_t root = 0;
  std::vector<PickledNode> nodes;
  std::unordered_map<std::string, uint32_t> text_indices;
  std::vector<const std::string*> texts;  ///< keys of text_indices: equal texts have equal indices
  std::vector<PickledStorage> storages;
  std::vector<PickledTensor> tensors;

  const std::string& text(const PickledNode& node) const { return *texts[static_cast<size_t>(node.value)]; }
  const std::string& text(uint32_t node) const { return text(nodes[node]); }
};

inline constexpr size_t kMaxPickledTensors = 1'000'000;

/// Interprets a pickle. Storages are looked up in `zip`, below `folder`. Throws Error if the pickle is malformed or
/// exceeds the limits that open_pt() documents.
PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle);

/// Returns "a dict", "an object of class 'x'", ... for messages.
std::string describe(const PickledGraph& graph, uint32_t node);

}  // namespace voxgrad
