// Converts a pickle to values without executing any Python code, for core/io/pt.cpp.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
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
  PtValue::Kind kind = PtValue::Kind::none;
  enum class Role : uint8_t { plain, global, storage, numpy_dtype } role = Role::plain;  ///< the role of an object
  uint32_t detail = 0;  ///< for a storage: index into `storages`; for a NumPy dtype: node of the type code
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

/// Creates the values of a pickle and evaluates the calls that build tensors and plain data. Functions throw Error for
/// values of the wrong kind and if a limit is exceeded.
class PickleBuilder {
 public:
  using Indices = std::vector<uint32_t>;
  using Kind = PtValue::Kind;
  using Role = PickledNode::Role;
  /// The class names of objects that the builder creates itself: indices of texts.
  enum ClassName : uint8_t { class_int, class_set, class_frozenset, class_storage, class_dtype };

  /// Keeps references to the first three arguments. The texts may take up to four times `pickle_bytes`, the size of the
  /// pickle.
  PickleBuilder(const InputFile& file, const ZipFile& zip, const std::string& folder, size_t pickle_bytes);

  PickledGraph graph;

  template <class... Args>
  void check(bool condition, const Args&... args) const {
    file_.check(condition, "the pickle is malformed: ", args...);
  }
  PickledNode& node(uint32_t index) { return graph.nodes[index]; }
  int64_t integer(uint32_t index, const char* what);
  const std::string& text(uint32_t index, const char* what);
  /// Returns the items of a list or tuple. The reference is valid until a value is added.
  const Indices& items(uint32_t index, const char* what);

  uint32_t add(PickledNode node);
  uint32_t make(Kind kind, int64_t value) { return add({.kind = kind, .value = value}); }
  uint32_t make(Kind kind, Indices children) { return add({.kind = kind, .children = std::move(children)}); }
  uint32_t make_number(double value);
  /// Converts a little-endian two's complement number.
  uint32_t make_integer(std::string_view bytes);
  uint32_t make_text(Kind kind, std::string_view text, Role role = Role::plain);
  /// Returns a class or function. PyTorch's dtypes are represented as texts.
  uint32_t make_global(std::string_view module, std::string_view name);
  /// Returns a storage for the tuple ('storage', class, key, device, number of elements).
  uint32_t make_storage(uint32_t id);
  /// Returns the result of a call. Returns an object of class `function` if the builder cannot evaluate the call.
  uint32_t call(uint32_t function, uint32_t arguments, bool has_keywords);
  /// Discards the state of an object, except the byte order of a NumPy dtype.
  void set_state(uint32_t object, uint32_t state);

 private:
  /// A function that the builder evaluates. `call` returns nullopt if it cannot evaluate these arguments.
  struct Function {
    std::string_view name;
    size_t min_arguments;
    std::optional<uint32_t> (PickleBuilder::*call)(const Indices& arguments);
  };
  static const Function kFunctions[];

  void add_storage(PickledStorage storage);
  void set_geometry(PickledTensor& tensor, const Indices& sizes, const Indices& strides);
  std::optional<uint32_t> make_dict(const Indices& arguments);
  std::optional<uint32_t> first_argument(const Indices& arguments);
  std::optional<uint32_t> make_tensor(const Indices& arguments);
  std::optional<uint32_t> make_device(const Indices& arguments);
  std::optional<uint32_t> make_numpy_dtype(const Indices& arguments);
  std::optional<uint32_t> make_numpy_scalar(const Indices& arguments);
  std::optional<uint32_t> make_bytes(const Indices& arguments);

  const InputFile& file_;
  const ZipFile& zip_;
  const std::string& folder_;
  size_t pickle_bytes_;
  size_t text_bytes_ = 0;
  std::unordered_map<std::string, uint32_t> storages_;  ///< indices by key
};

/// Interprets a pickle. Storages are entries of `zip` that begin with `folder`, which ends with '/'. Throws Error if
/// the pickle is malformed or exceeds a limit that open_pt() documents.
PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle);

}  // namespace voxgrad
