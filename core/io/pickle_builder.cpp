#include <algorithm>
#include <bit>
#include <cstring>

#include "core/io/detail/unpickler.h"

namespace voxgrad {
namespace {

constexpr size_t kMaxNodes = 4'000'000;
constexpr size_t kMaxArguments = 8;     // maximum number of arguments of evaluated calls
constexpr size_t kMaxShortText = 1000;  // bytes of a storage's key, of its type and of a device's type

constexpr std::pair<std::string_view, DType> kStorageTypes[] = {
    {"torch.FloatStorage", f32}, {"torch.DoubleStorage", f64},    {"torch.HalfStorage", f16}, {"torch.IntStorage", i32},
    {"torch.LongStorage", i64},  {"torch.BFloat16Storage", bf16}, {"torch.ByteStorage", u8},  {"torch.BoolStorage", b8},
};
constexpr std::string_view kDtypePrefixes[] = {"float", "bfloat", "int", "uint", "bool", "complex", "qint", "quint"};

/// Returns the T whose memory contains these bytes.
template <class T>
T from_bytes(const std::string& bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof(T));
  return value;
}

}  // namespace

using Indices = PickleBuilder::Indices;

PickleBuilder::PickleBuilder(const InputFile& file, const ZipFile& zip, const std::string& folder, size_t pickle_bytes)
    : file_(file), zip_(zip), folder_(folder), pickle_bytes_(pickle_bytes) {
  graph.nodes.resize(1);
  graph.texts = {"int", "builtins.set", "builtins.frozenset", "torch.Storage",
                 "numpy.dtype"};  // in the order of ClassName
}

int64_t PickleBuilder::integer(uint32_t index, const char* what) {
  check(node(index).kind == Kind::integer, what, " must be an integer, found ", graph.describe(index));
  return node(index).value;
}

const std::string& PickleBuilder::text(uint32_t index, const char* what) {
  check(node(index).kind == Kind::text, what, " must be a text, found ", graph.describe(index));
  return graph.text(index);
}

const Indices& PickleBuilder::items(uint32_t index, const char* what) {
  const Kind kind = node(index).kind;
  check(kind == Kind::list || kind == Kind::tuple, what, " must be a tuple, found ", graph.describe(index));
  return node(index).children;
}

uint32_t PickleBuilder::add(PickledNode node) {
  file_.check(graph.nodes.size() < kMaxNodes, "the pickle has more than ", kMaxNodes, " values");
  graph.nodes.push_back(std::move(node));
  return static_cast<uint32_t>(graph.nodes.size() - 1);
}

uint32_t PickleBuilder::make_number(double value) { return make(Kind::number, std::bit_cast<int64_t>(value)); }

uint32_t PickleBuilder::make_integer(std::string_view bytes) {
  const bool is_negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
  while (bytes.size() > 8 && bytes.back() == (is_negative ? '\xff' : '\0')) bytes.remove_suffix(1);
  int64_t value = is_negative ? -1 : 0;
  if (!bytes.empty()) std::memcpy(&value, bytes.data(), std::min<size_t>(bytes.size(), 8));
  const bool fits = bytes.size() <= 8 && (value < 0) == is_negative;
  return fits ? make(Kind::integer, value) : make(Kind::object, class_int);
}

uint32_t PickleBuilder::make_text(Kind kind, std::string_view text, Role role) {
  // Calls and class names copy texts. Without this limit, a small pickle could copy a large text many times.
  text_bytes_ += text.size();
  file_.check(text_bytes_ / 4 <= pickle_bytes_, "the texts of the pickle take more than four times its size");
  graph.texts.emplace_back(text);
  return add({.kind = kind, .role = role, .value = static_cast<int64_t>(graph.texts.size() - 1)});
}

uint32_t PickleBuilder::make_global(std::string_view module, std::string_view name) {
  const bool is_dtype = module == "torch" && std::any_of(std::begin(kDtypePrefixes), std::end(kDtypePrefixes),
                                                         [&](auto prefix) { return name.starts_with(prefix); });
  const std::string full = std::string(module).append(".").append(name);
  return is_dtype ? make_text(Kind::text, full) : make_text(Kind::object, full, Role::global);
}

uint32_t PickleBuilder::make_storage(uint32_t id) {
  const Indices parts = items(id, "a persistent id").size() == 5 ? node(id).children : Indices();
  check(!parts.empty() && text(parts[0], "the first item of a persistent id") == "storage", "unknown persistent id");
  const std::string& key = text(parts[2], "the key of a storage");
  const int64_t numel = integer(parts[4], "the size of a storage");
  check(key.size() <= kMaxShortText && numel >= 0, "wrong key or size of storage ", in_quotes(key));
  check(node(parts[1]).role == Role::global, "the type of a storage must be a class, found ", graph.describe(parts[1]));
  const std::string& type = graph.text(parts[1]);
  check(type.size() <= kMaxShortText && type.starts_with("torch.") && type.ends_with("Storage"), in_quotes(type),
        " is not a type of storage");
  const auto [place, is_new] = storages_.emplace(key, static_cast<uint32_t>(graph.storages.size()));
  if (is_new) add_storage({.key = key, .type = type, .numel = numel});
  const PickledStorage& storage = graph.storages[place->second];
  check(storage.type == type && storage.numel == numel, "storage ", in_quotes(key), " has two types or sizes");
  return add({.kind = Kind::object, .role = Role::storage, .detail = place->second, .value = class_storage});
}

void PickleBuilder::add_storage(PickledStorage storage) {
  for (const auto& [name, dtype] : kStorageTypes) {
    if (storage.type != name) continue;
    storage.dtype = dtype;
    storage.range = zip_.find(concat(folder_, "data/", storage.key));
    const int64_t bytes = storage.range.size, item = item_size(dtype);
    file_.check(bytes % item == 0 && bytes / item == storage.numel, "storage ", in_quotes(storage.key), " should have ",
                storage.numel, " elements of ", dtype, ", but its entry has ", bytes, " bytes");
  }
  graph.storages.push_back(std::move(storage));
}

const PickleBuilder::Function PickleBuilder::kFunctions[] = {
    {"collections.OrderedDict", 0, &PickleBuilder::make_dict},
    {"torch._utils._rebuild_tensor_v2", 4, &PickleBuilder::make_tensor},
    {"torch._utils._rebuild_tensor_v3", 7, &PickleBuilder::make_tensor},
    {"torch._utils._rebuild_parameter", 1, &PickleBuilder::first_argument},
    {"torch._utils._rebuild_parameter_with_state", 1, &PickleBuilder::first_argument},
    {"torch.Size", 1, &PickleBuilder::first_argument},
    {"torch.device", 1, &PickleBuilder::make_device},
    {"numpy.dtype", 1, &PickleBuilder::make_numpy_dtype},
    {"numpy.core.multiarray.scalar", 2, &PickleBuilder::make_numpy_scalar},
    {"numpy._core.multiarray.scalar", 2, &PickleBuilder::make_numpy_scalar},
    {"_codecs.encode", 2, &PickleBuilder::make_bytes},
};

uint32_t PickleBuilder::call(uint32_t function, uint32_t arguments, bool has_keywords) {
  const PickledNode callee = node(function);
  check(callee.kind == Kind::object, "expected a class or function, found ", graph.describe(function));
  const bool is_short = items(arguments, "arguments").size() <= kMaxArguments;
  const Indices values = is_short ? node(arguments).children : Indices();
  std::optional<uint32_t> result;
  for (const Function& known : kFunctions) {
    if (callee.role != Role::global || has_keywords || graph.text(function) != known.name) continue;
    check(values.size() >= known.min_arguments, known.name, " has too few or too many arguments");
    result = (this->*known.call)(values);
  }
  return result ? *result : make(Kind::object, callee.value);
}

void PickleBuilder::set_state(uint32_t object, uint32_t state) {
  if (node(object).role != Role::numpy_dtype) return;
  const Indices& values = items(state, "the state of a NumPy dtype");
  const bool is_little_endian = values.size() >= 2 && text(values[1], "a byte order") != ">";
  if (!is_little_endian) node(object).role = Role::plain;  // scalars of this dtype become objects
}

// ---- calls

std::optional<uint32_t> PickleBuilder::make_dict(const Indices& arguments) {
  if (!arguments.empty()) return {};
  return make(Kind::dict, Indices());
}

/// Returns the tensor of a Parameter, or the tuple of a torch.Size.
std::optional<uint32_t> PickleBuilder::first_argument(const Indices& arguments) {
  const Kind kind = node(arguments[0]).kind;
  return kind == Kind::tensor || kind == Kind::tuple ? std::optional(arguments[0]) : std::nullopt;
}

/// Arguments: storage, offset, shape, strides, requires_grad, hooks, and the dtype (v3) or metadata (v2).
std::optional<uint32_t> PickleBuilder::make_tensor(const Indices& arguments) {
  const PickledNode& source = node(arguments[0]);
  check(source.role == Role::storage, "a tensor needs a storage, found ", graph.describe(arguments[0]));
  PickledTensor tensor{.storage = source.detail, .offset = integer(arguments[1], "the offset of a tensor")};
  const PickledStorage& storage = graph.storages[tensor.storage];
  const size_t axes = items(arguments[2], "the shape of a tensor").size();
  check(items(arguments[3], "the strides of a tensor").size() == axes, "a tensor needs a stride for each axis");
  const uint32_t last = arguments.size() > 6 ? arguments[6] : 0;
  if (node(last).kind == Kind::text)  // PyTorch has no storage class for this dtype
    tensor.problem = concat("dtype ", in_quotes(graph.text(last)), " is not supported");
  else if (node(last).kind == Kind::dict && !node(last).children.empty())
    tensor.problem = "lazily negated or conjugated elements are not supported";
  else if (!storage.dtype)
    tensor.problem = concat("elements of ", in_quotes(storage.type), " are not supported");
  else if (axes > kMaxRank)
    tensor.problem = concat(axes, " axes are not supported; the maximum is ", kMaxRank);
  else
    set_geometry(tensor, node(arguments[2]).children, node(arguments[3]).children);
  file_.check(graph.tensors.size() < kMaxPickledTensors, "more than ", kMaxPickledTensors, " tensors");
  graph.tensors.push_back(std::move(tensor));
  return make(Kind::tensor, static_cast<int64_t>(graph.tensors.size() - 1));
}

/// Sets shape and strides. Throws if an element lies outside the storage.
void PickleBuilder::set_geometry(PickledTensor& tensor, const Indices& sizes, const Indices& strides) {
  const PickledStorage& storage = graph.storages[tensor.storage];
  const std::string what = concat("a tensor in storage ", in_quotes(storage.key), ": ");
  int64_t last = tensor.offset;
  bool is_inside = last >= 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = integer(sizes[i], "a size"), stride = integer(strides[i], "a stride");
    tensor.shape.push_back(size);
    tensor.strides.push_back(stride);
    int64_t step = 0;
    is_inside &= stride >= 0;
    if (size > 1) is_inside &= !__builtin_mul_overflow(size - 1, stride, &step);
    is_inside &= !__builtin_add_overflow(last, step, &last);
  }
  claimed_bytes(file_, what, tensor.shape, name(*storage.dtype), 8 * item_size(*storage.dtype));
  const bool is_empty = numel(tensor.shape) == 0;
  file_.check(is_empty || (is_inside && last < storage.numel), what, "shape ", tensor.shape, " with strides ",
              tensor.strides, " at offset ", tensor.offset, " reaches outside its ", storage.numel, " elements");
  if (!is_empty) return;
  tensor.offset = 0;
  tensor.strides = contiguous_strides(tensor.shape);
}

std::optional<uint32_t> PickleBuilder::make_device(const Indices& arguments) {
  const std::string& type = text(arguments[0], "the type of a device");
  check(type.size() <= kMaxShortText, "unknown device");
  if (arguments.size() == 1) return make_text(Kind::text, std::string(type));
  return make_text(Kind::text, concat(type, ':', integer(arguments[1], "the index of a device")));
}

std::optional<uint32_t> PickleBuilder::make_numpy_dtype(const Indices& arguments) {
  text(arguments[0], "a NumPy dtype");
  return add({.kind = Kind::object, .role = Role::numpy_dtype, .detail = arguments[0], .value = class_dtype});
}

std::optional<uint32_t> PickleBuilder::make_numpy_scalar(const Indices& arguments) {
  const PickledNode& dtype = node(arguments[0]);
  if (dtype.role != Role::numpy_dtype || node(arguments[1]).kind != Kind::bytes) return {};
  const std::string& code = graph.text(dtype.detail);
  const std::string bytes = graph.text(arguments[1]).substr(0, 9);
  if (code.size() != 2 || bytes.empty() || bytes.size() != static_cast<size_t>(code[1] - '0')) return {};
  if (code == "b1") return make(Kind::boolean, bytes[0] != 0);
  if (code[0] == 'i') return make_integer(bytes);
  if (code[0] == 'u') return make_integer(bytes + '\0');
  if (code == "f2") return make_number(static_cast<float>(from_bytes<Float16>(bytes)));
  if (code == "f4") return make_number(from_bytes<float>(bytes));
  if (code == "f8") return make_number(from_bytes<double>(bytes));
  return {};
}

/// Converts a latin-1 text to bytes. Pickles of protocols 1 and 2 store bytes as latin-1 texts.
std::optional<uint32_t> PickleBuilder::make_bytes(const Indices& arguments) {
  if (text(arguments[1], "an encoding") != "latin1") return {};
  const std::string& utf8 = text(arguments[0], "a text to encode");
  std::string bytes;
  for (size_t i = 0; i < utf8.size(); ++i) {
    const bool is_pair = utf8[i] == '\xc2' || utf8[i] == '\xc3';
    check((utf8[i] & 0x80) == 0 || (is_pair && i + 1 < utf8.size()), "a text is not latin-1");
    bytes += is_pair ? static_cast<char>((utf8[i] & 3) << 6 | (utf8[i + 1] & 0x3f)) : utf8[i];
    i += is_pair;
  }
  return make_text(Kind::bytes, bytes);
}

std::string PickledGraph::describe(uint32_t node) const {
  constexpr const char* kNames[] = {"None",   "a bool",  "an integer", "a number", "a text",   "bytes",
                                    "a list", "a tuple", "a dict",     "a tensor", "an object"};
  const char* name = kNames[static_cast<size_t>(nodes[node].kind)];
  return nodes[node].kind == PtValue::Kind::object ? concat(name, " of class ", in_quotes(text(node))) : name;
}

}  // namespace voxgrad
