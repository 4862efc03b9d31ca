// Implements the reader of checkpoints that torch.save wrote.
#include "core/io/pt.h"

#include <bit>
#include <map>
#include <mutex>

#include "core/autograd.h"
#include "core/io/detail/unpickler.h"

namespace voxgrad {

using Kind = PtValue::Kind;

namespace {

static_assert(std::endian::native == std::endian::little, "elements of checkpoints are little-endian");

constexpr int64_t kMaxPickle = 256'000'000;   // bytes
constexpr size_t kMaxLevels = 1000;           // nested containers
constexpr int64_t kMaxVisited = 10'000'000;   // values that a search for tensors visits
constexpr size_t kMaxNameBytes = 64'000'000;  // bytes of the names of all tensors
constexpr size_t kMaxShownPath = 1000;        // bytes of a path in a message

std::string read_entry(const InputFile& file, const ZipFile& zip, const std::string& name, int64_t limit) {
  const ZipFile::Range range = zip.find(name);
  file.check(range.size <= limit, "entry ", in_quotes(name), " has ", range.size, " bytes, at most ", limit,
             " are allowed");
  file.check_limit(range.size, "entry ", in_quotes(name));
  std::string text(static_cast<size_t>(range.size), '\0');
  file.read_at(range.position, text.data(), text.size());
  return text;
}

/// Returns the folder in the archive that contains data.pkl.
std::string find_folder(const InputFile& file, const ZipFile& zip) {
  std::string folder;
  for (const auto& [name, entry] : zip.entries()) {
    if (!name.ends_with("/data.pkl") || name.find('/') != name.size() - 9) continue;
    file.check(folder.empty(), "the archive contains two files named data.pkl");
    folder = name.substr(0, name.size() - 8);
  }
  file.check(!folder.empty(), "the archive contains no data.pkl; torch.save did not write it");
  file.check(!zip.entries().contains(folder + "constants.pkl"),
             "TorchScript archives are not supported; save the state_dict() of the model with torch.save");
  return folder;
}

}  // namespace

struct PtFile {
  PtFile(const std::filesystem::path& path, const char* op, const PtOptions& options)
      : file(path, op, options.max_bytes) {
    const ZipFile zip(file);
    const std::string folder = find_folder(file, zip);
    if (zip.entries().contains(folder + "byteorder")) {
      const std::string order = read_entry(file, zip, folder + "byteorder", 100);
      file.check(order == "little", "the byte order of the elements must be little, found ", in_quotes(order));
    }
    const std::string pickle = read_entry(file, zip, folder + "data.pkl", kMaxPickle);
    graph = unpickle(file, zip, folder, pickle);
    loaded.resize(graph.storages.size());
  }

  /// Returns a storage on the CPU as a tensor with one axis. Reads the storage from the file unless a tensor already
  /// uses the storage.
  Tensor load_storage(uint32_t index) const {
    const PickledStorage& storage = graph.storages[index];
    const std::lock_guard lock(mutex);
    if (auto memory = loaded[index].lock())
      return Tensor(
          std::make_shared<TensorBody>(TensorBody{std::move(memory), 0, {storage.numel}, {1}, *storage.dtype}));
    const Tensor tensor = empty({storage.numel}, {.dtype = *storage.dtype});
    file.read_at(storage.range.position, tensor.mutable_raw_data(), static_cast<size_t>(storage.range.size));
    if (storage.dtype == b8) check_bools(file, concat("storage ", in_quotes(storage.key), ": "), tensor);
    loaded[index] = tensor.storage();
    return tensor;
  }

  /// Returns the nodes of all tensors below `root` by dotted names.
  std::map<std::string, uint32_t> find_tensors(uint32_t root) const {
    struct Level {
      uint32_t node;
      size_t next;  ///< index of the next child
    };
    std::map<std::string, uint32_t> tensors;
    std::vector<Level> levels;
    std::vector<bool> is_open(graph.nodes.size());  // whether a node is in `levels`
    size_t name_bytes = 0;
    int64_t visited = 0;
    const auto add = [&](uint32_t tensor) {
      std::string name;
      for (const Level& level : levels) {
        const PickledNode& parent = graph.nodes[level.node];
        std::string key = std::to_string(level.next - 1);
        if (parent.kind == Kind::dict) {
          const uint32_t index = parent.children[level.next - 2];
          const PickledNode& node = graph.nodes[index];
          file.check(node.kind == Kind::text || node.kind == Kind::integer, "a dict that contains tensors below ",
                     in_quotes(name), " has a key that is ", graph.describe(index), ", not a text or integer");
          key = node.kind == Kind::text ? graph.text(index) : std::to_string(node.value);
        }
        name_bytes += key.size() + 1;
        file.check(name_bytes <= kMaxNameBytes, "the names of the tensors take more than ", kMaxNameBytes, " bytes");
        if (&level != &levels.front()) name += '.';
        name += key;
      }
      file.check(tensors.emplace(name, tensor).second, "two tensors have the name ", in_quotes(name));
      file.check(tensors.size() <= kMaxPickledTensors, "more than ", kMaxPickledTensors, " tensors");
    };
    const auto visit = [&](uint32_t node) {
      const Kind kind = graph.nodes[node].kind;
      if (kind == Kind::tensor) add(node);
      if ((kind != Kind::list && kind != Kind::tuple && kind != Kind::dict) || is_open[node]) return;
      file.check(levels.size() < kMaxLevels, "containers have more than ", kMaxLevels, " levels");
      is_open[node] = true;
      levels.push_back({node, 0});
    };
    visit(root);
    while (!levels.empty()) {
      Level& level = levels.back();
      const PickledNode& parent = graph.nodes[level.node];
      if (level.next >= parent.children.size()) {
        is_open[level.node] = false;
        levels.pop_back();
        continue;
      }
      file.check(++visited <= kMaxVisited, "the containers have more than ", kMaxVisited,
                 " values; shared containers count repeatedly");
      level.next += parent.kind == Kind::dict ? 2 : 1;
      visit(parent.children[level.next - 1]);
    }
    return tensors;
  }

  TensorMap load(uint32_t root, const std::string& path, Device device) const {
    runtime(device).require(device.index);
    const std::map<std::string, uint32_t> names = find_tensors(root);
    std::map<uint32_t, Tensor> storages;
    int64_t bytes = 0;
    for (const auto& [name, node] : names) {
      const PickledTensor& tensor = graph.tensors[static_cast<size_t>(graph.nodes[node].value)];
      check_tensor(path.empty() || name.empty() ? path + name : concat(path, '.', name), tensor);
      if (storages.try_emplace(tensor.storage).second) bytes += graph.storages[tensor.storage].range.size;
    }
    file.check_limit(bytes, "loading all tensors");
    for (auto& [index, storage] : storages) storage = load_storage(index).to(device);
    std::map<uint32_t, Tensor> views;  // by node
    TensorMap tensors;
    for (const auto& [name, node] : names) {
      const PickledTensor& tensor = graph.tensors[static_cast<size_t>(graph.nodes[node].value)];
      Tensor& view = views[node];
      if (!view.defined()) view = as_strided(storages[tensor.storage], tensor.shape, tensor.strides, tensor.offset);
      tensors.emplace_hint(tensors.end(), name, view);
    }
    return tensors;
  }

  /// Throws if a tensor cannot be loaded.
  void check_tensor(const std::string& path, const PickledTensor& tensor) const {
    file.check(tensor.problem.empty(), "tensor ", in_quotes(path), " cannot be loaded: ", tensor.problem);
    const PickledStorage& storage = graph.storages[tensor.storage];
    file.check_limit(std::max(storage.range.size, numel(tensor.shape) * item_size(*storage.dtype)), "tensor ",
                     in_quotes(path));
  }

  InputFile file;
  PickledGraph graph;
  mutable std::mutex mutex;
  mutable std::vector<std::weak_ptr<Storage>> loaded;  ///< storages in use, by index; guarded by the mutex
};

// ---- values

PtValue PtValue::child(uint32_t node, std::string_view key) const {
  const std::string shown = in_quotes(key);
  std::string path = concat(path_, path_.empty() ? "" : ".", std::string_view(shown).substr(1, shown.size() - 2));
  if (path.size() > kMaxShownPath) path = "..." + path.substr(path.size() - kMaxShownPath / 2);
  return {file_, node, std::move(path)};
}

/// Throws unless the value has the expected kind.
void PtValue::expect(bool condition, const char* expected) const {
  if (condition) return;
  const std::string found = file_->graph.describe(node_);
  if (path_.empty()) file_->file.fail("expected ", expected, ", found ", found);
  file_->file.fail("'", path_, "': expected ", expected, ", found ", found);
}

Kind PtValue::kind() const { return file_->graph.nodes[node_].kind; }

bool PtValue::boolean() const {
  expect(kind() == Kind::boolean, "a bool");
  return file_->graph.nodes[node_].value != 0;
}

int64_t PtValue::integer() const {
  expect(kind() == Kind::integer, "an integer");
  return file_->graph.nodes[node_].value;
}

double PtValue::number() const {
  expect(kind() == Kind::number || kind() == Kind::integer, "a number");
  const int64_t value = file_->graph.nodes[node_].value;
  return kind() == Kind::integer ? static_cast<double>(value) : std::bit_cast<double>(value);
}

const std::string& PtValue::text() const {
  expect(kind() == Kind::text || kind() == Kind::bytes, "a text");
  return file_->graph.text(node_);
}

std::vector<PtValue> PtValue::items() const {
  expect(kind() == Kind::list || kind() == Kind::tuple, "a list or tuple");
  std::vector<PtValue> items;
  for (const uint32_t node : file_->graph.nodes[node_].children)
    items.push_back(child(node, std::to_string(items.size())));
  return items;
}

std::vector<std::pair<PtValue, PtValue>> PtValue::members() const {
  expect(kind() == Kind::dict, "a dict");
  const PickledGraph& graph = file_->graph;
  std::vector<std::pair<PtValue, PtValue>> members;
  const std::vector<uint32_t>& children = graph.nodes[node_].children;
  for (size_t i = 0; i < children.size(); i += 2) {
    const PickledNode& key = graph.nodes[children[i]];
    const std::string name = key.kind == Kind::text      ? graph.text(children[i])
                             : key.kind == Kind::integer ? std::to_string(key.value)
                                                         : concat('(', graph.describe(children[i]), ')');
    members.emplace_back(child(children[i], "key " + name), child(children[i + 1], name));
  }
  return members;
}

/// Returns the node of a text key, or nothing if there is none.
std::optional<uint32_t> PtValue::lookup(std::string_view key) const {
  expect(kind() == Kind::dict, "a dict");
  const PickledGraph& graph = file_->graph;
  const std::vector<uint32_t>& children = graph.nodes[node_].children;
  for (size_t i = children.size(); i > 0; i -= 2)  // backward, because Python uses the last of equal keys
    if (graph.nodes[children[i - 2]].kind == Kind::text && graph.text(children[i - 2]) == key) return children[i - 1];
  return {};
}

PtValue PtValue::find(std::string_view key) const { return child(lookup(key).value_or(0), key); }

PtValue PtValue::at(std::string_view key) const {
  const std::optional<uint32_t> found = lookup(key);
  PtValue value = child(found.value_or(0), key);
  file_->file.check(found.has_value(), "there is no key '", value.path_, "'");
  return value;
}

Tensor PtValue::tensor() const {
  expect(kind() == Kind::tensor, "a tensor");
  const PickledTensor& tensor = file_->graph.tensors[static_cast<size_t>(file_->graph.nodes[node_].value)];
  file_->check_tensor(path_, tensor);
  return as_strided(file_->load_storage(tensor.storage), tensor.shape, tensor.strides, tensor.offset);
}

TensorMap PtValue::tensors() const { return file_->load(node_, path_, Device::cpu()); }

PtValue open_pt(const std::filesystem::path& path, const PtOptions& options) {
  auto file = std::make_shared<const PtFile>(path, "open_pt", options);
  const uint32_t root = file->graph.root;
  return {std::move(file), root, ""};
}

TensorMap load_pt(const std::filesystem::path& path, Device device, const PtOptions& options) {
  const PtFile file(path, "load_pt", options);
  const uint32_t root = file.graph.root;
  file.file.check(file.graph.nodes[root].kind != Kind::object, "it contains ", file.graph.describe(root),
                  ", not tensors; save the state_dict() of a module instead");
  return file.load(root, "", device);
}

}  // namespace voxgrad
