// Interprets the instructions of a Python pickle, which operate on a stack. The time of an instruction is proportional
// to its size in bytes or to the number of values that it removes from the stack. The time and memory of all
// instructions together are therefore proportional to the size of the pickle.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <unordered_map>

#include "core/io/detail/unpickler.h"

namespace voxgrad {
namespace {

using Kind = PtValue::Kind;
using Role = PickledNode::Role;
using Indices = std::vector<uint32_t>;

constexpr size_t kMaxNodes = 4'000'000;
constexpr size_t kMaxArguments = 8;     // maximum number of arguments of evaluated calls
constexpr size_t kMaxShortText = 1000;  // maximum bytes of a storage's key, a storage's type and a device's type

constexpr std::pair<std::string_view, DType> kStorageTypes[] = {
    {"torch.FloatStorage", f32}, {"torch.DoubleStorage", f64},    {"torch.HalfStorage", f16}, {"torch.IntStorage", i32},
    {"torch.LongStorage", i64},  {"torch.BFloat16Storage", bf16}, {"torch.ByteStorage", u8},  {"torch.BoolStorage", b8},
};
constexpr std::string_view kDtypePrefixes[] = {"float", "bfloat", "int", "uint", "bool", "complex", "qint", "quint"};
/// Class names that this reader assigns, because the pickle does not contain them: indices into PickledGraph::texts.
enum ClassName : uint8_t { class_int, class_set, class_frozenset, class_storage, class_dtype };

/// Returns the T whose memory contains these bytes.
template <class T>
T from_bytes(const std::string& bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof(T));
  return value;
}

class Unpickler {
 public:
  Unpickler(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle)
      : file_(file), zip_(zip), folder_(folder), pickle_(pickle) {
    graph_.nodes.resize(1);
    graph_.texts = {"int", "builtins.set", "builtins.frozenset", "torch.Storage",
                    "numpy.dtype"};  // in the order of ClassName
  }

  PickledGraph run();

 private:
  struct Instruction {
    uint8_t code;
    void (Unpickler::*run)(size_t argument);
    size_t argument = 0;
  };
  static const Instruction kInstructions[];
  /// A function that is evaluated. `call` returns nullopt if it cannot evaluate these arguments.
  struct Function {
    std::string_view name;
    size_t min_arguments;
    std::optional<uint32_t> (Unpickler::*call)(const Indices& arguments);
  };
  static const Function kFunctions[];

  template <class... Args>
  void check(bool condition, const Args&... args) const {
    file_.check(condition, "the pickle is malformed before byte ", position_, ": ", args...);
  }
  std::string_view take(uint64_t count) {
    check(count <= pickle_.size() - position_, "it is truncated, or a length is wrong");
    position_ += static_cast<size_t>(count);
    return pickle_.substr(position_ - static_cast<size_t>(count), static_cast<size_t>(count));
  }
  uint64_t take_unsigned(size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, take(bytes).data(), bytes);
    return value;
  }
  std::string_view take_line() {
    const size_t end = pickle_.find('\n', position_);
    check(end != std::string_view::npos, "a line has no end");
    std::string_view line = take(end + 1 - position_);
    line.remove_suffix(1);
    return line;
  }

  // ---- values
  PickledNode& node(uint32_t index) { return graph_.nodes[index]; }
  int64_t integer(uint32_t index, const char* what) {
    check(node(index).kind == Kind::integer, what, " must be an integer, found ", graph_.describe(index));
    return node(index).value;
  }
  const std::string& text(uint32_t index, const char* what) {
    check(node(index).kind == Kind::text, what, " must be a text, found ", graph_.describe(index));
    return graph_.text(index);
  }
  /// Returns the items of a list or tuple. The reference is valid until a value is added.
  const Indices& items(uint32_t index, const char* what) {
    const Kind kind = node(index).kind;
    check(kind == Kind::list || kind == Kind::tuple, what, " must be a tuple, found ", graph_.describe(index));
    return node(index).children;
  }

  uint32_t add(PickledNode node) {
    file_.check(graph_.nodes.size() < kMaxNodes, "the pickle has more than ", kMaxNodes, " values");
    graph_.nodes.push_back(std::move(node));
    return static_cast<uint32_t>(graph_.nodes.size() - 1);
  }
  uint32_t make(Kind kind, int64_t value) { return add({.kind = kind, .value = value}); }
  uint32_t make(Kind kind, Indices children) { return add({.kind = kind, .children = std::move(children)}); }
  uint32_t make_number(double value) { return make(Kind::number, std::bit_cast<int64_t>(value)); }
  /// Converts a little-endian two's complement number.
  uint32_t make_integer(std::string_view bytes) {
    const bool is_negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
    while (bytes.size() > 8 && bytes.back() == (is_negative ? '\xff' : '\0')) bytes.remove_suffix(1);
    int64_t value = is_negative ? -1 : 0;
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), std::min<size_t>(bytes.size(), 8));
    const bool fits = bytes.size() <= 8 && (value < 0) == is_negative;
    return fits ? make(Kind::integer, value) : make(Kind::object, class_int);
  }
  uint32_t make_text(Kind kind, std::string_view text, Role role = Role::plain) {
    // Calls and class names copy texts. Without this limit, a small pickle could copy a large text many times.
    text_bytes_ += text.size();
    file_.check(text_bytes_ / 4 <= pickle_.size(), "the texts of the pickle take more than four times its size");
    graph_.texts.emplace_back(text);
    return add({.kind = kind, .role = role, .value = static_cast<int64_t>(graph_.texts.size() - 1)});
  }
  /// Returns a class or function. PyTorch's dtypes are represented as texts.
  uint32_t make_global(std::string_view module, std::string_view name) {
    const bool is_dtype =
        module == "torch" && std::ranges::any_of(kDtypePrefixes, [&](auto prefix) { return name.starts_with(prefix); });
    const std::string full = std::string(module).append(".").append(name);
    return is_dtype ? make_text(Kind::text, full) : make_text(Kind::object, full, Role::global);
  }
  /// Returns a storage for the tuple ('storage', class, key, device, number of elements).
  uint32_t make_storage(uint32_t id) {
    const Indices parts = items(id, "a persistent id").size() == 5 ? node(id).children : Indices();
    check(!parts.empty() && text(parts[0], "the first item of a persistent id") == "storage", "unknown persistent id");
    const std::string& key = text(parts[2], "the key of a storage");
    const int64_t numel = integer(parts[4], "the size of a storage");
    check(key.size() <= kMaxShortText && numel >= 0, "wrong key or size of storage ", in_quotes(key));
    check(node(parts[1]).role == Role::global, "the type of a storage must be a class, found ",
          graph_.describe(parts[1]));
    const std::string& type = graph_.text(parts[1]);
    check(type.size() <= kMaxShortText && type.starts_with("torch.") && type.ends_with("Storage"), in_quotes(type),
          " is not a type of storage");
    const auto [place, is_new] = storages_.emplace(key, static_cast<uint32_t>(graph_.storages.size()));
    if (is_new) add_storage({.key = key, .type = type, .numel = numel});
    const PickledStorage& storage = graph_.storages[place->second];
    check(storage.type == type && storage.numel == numel, "storage ", in_quotes(key), " has two types or sizes");
    return add({.kind = Kind::object, .role = Role::storage, .detail = place->second, .value = class_storage});
  }
  void add_storage(PickledStorage storage) {
    for (const auto& [name, dtype] : kStorageTypes) {
      if (storage.type != name) continue;
      storage.dtype = dtype;
      storage.range = zip_.find(concat(folder_, "data/", storage.key));
      const int64_t bytes = storage.range.size, item = item_size(dtype);
      file_.check(bytes % item == 0 && bytes / item == storage.numel, "storage ", in_quotes(storage.key),
                  " should have ", storage.numel, storage.numel == 1 ? " element of " : " elements of ", dtype,
                  ", but its entry has ", in_bytes(bytes));
    }
    graph_.storages.push_back(std::move(storage));
  }

  // ---- functions that are evaluated
  std::optional<uint32_t> make_dict(const Indices& arguments) {
    if (!arguments.empty()) return {};
    return make(Kind::dict, Indices());
  }
  /// Returns the tensor of a Parameter, or the tuple of a torch.Size.
  std::optional<uint32_t> first_argument(const Indices& arguments) {
    const Kind kind = node(arguments[0]).kind;
    return kind == Kind::tensor || kind == Kind::tuple ? std::optional(arguments[0]) : std::nullopt;
  }
  /// Arguments: storage, offset, shape, strides, requires_grad, hooks, and the dtype (v3) or metadata (v2).
  std::optional<uint32_t> make_tensor(const Indices& arguments) {
    const PickledNode& source = node(arguments[0]);
    check(source.role == Role::storage, "a tensor needs a storage, found ", graph_.describe(arguments[0]));
    PickledTensor tensor{.storage = source.detail, .offset = integer(arguments[1], "the offset of a tensor")};
    const PickledStorage& storage = graph_.storages[tensor.storage];
    const size_t axes = items(arguments[2], "the shape of a tensor").size();
    check(items(arguments[3], "the strides of a tensor").size() == axes, "a tensor needs a stride for each axis");
    const uint32_t last = arguments.size() > 6 ? arguments[6] : 0;
    if (node(last).kind == Kind::text)  // PyTorch has no storage class for this dtype
      tensor.problem = concat("dtype ", in_quotes(graph_.text(last)), " is not supported");
    else if (node(last).kind == Kind::dict && !node(last).children.empty())
      tensor.problem = "lazily negated or conjugated elements are not supported";
    else if (!storage.dtype)
      tensor.problem = concat("elements of ", in_quotes(storage.type), " are not supported");
    else if (axes > kMaxRank)
      tensor.problem = concat(axes, " axes are not supported; the maximum is ", kMaxRank);
    else
      set_geometry(tensor, node(arguments[2]).children, node(arguments[3]).children);
    file_.check(graph_.tensors.size() < kMaxPickledTensors, "more than ", kMaxPickledTensors, " tensors");
    graph_.tensors.push_back(std::move(tensor));
    return make(Kind::tensor, static_cast<int64_t>(graph_.tensors.size() - 1));
  }
  /// Sets shape and strides. Throws if an element lies outside the storage.
  void set_geometry(PickledTensor& tensor, const Indices& sizes, const Indices& strides) {
    const PickledStorage& storage = graph_.storages[tensor.storage];
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
                tensor.strides, " at offset ", tensor.offset,
                " reaches outside the storage, whose number of elements is ", storage.numel);
    if (!is_empty) return;
    tensor.offset = 0;
    tensor.strides = contiguous_strides(tensor.shape);
  }
  std::optional<uint32_t> make_device(const Indices& arguments) {
    const std::string& type = text(arguments[0], "the type of a device");
    check(type.size() <= kMaxShortText, "unknown device");
    if (arguments.size() == 1) return make_text(Kind::text, std::string(type));
    return make_text(Kind::text, concat(type, ':', integer(arguments[1], "the index of a device")));
  }
  std::optional<uint32_t> make_numpy_dtype(const Indices& arguments) {
    text(arguments[0], "a NumPy dtype");
    return add({.kind = Kind::object, .role = Role::numpy_dtype, .detail = arguments[0], .value = class_dtype});
  }
  std::optional<uint32_t> make_numpy_scalar(const Indices& arguments) {
    const PickledNode& dtype = node(arguments[0]);
    if (dtype.role != Role::numpy_dtype || node(arguments[1]).kind != Kind::bytes) return {};
    const std::string& code = graph_.text(dtype.detail);
    const std::string bytes = graph_.text(arguments[1]).substr(0, 9);
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
  std::optional<uint32_t> make_bytes(const Indices& arguments) {
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

  // ---- the stack
  void push(uint32_t index) { stack_.push_back(index); }
  size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  uint32_t& top() {
    check(available() > 0, "a value is missing on the stack");
    return stack_.back();
  }
  uint32_t pop() {
    const uint32_t index = top();
    stack_.pop_back();
    return index;
  }
  /// Removes the last `count` values or, if `count` is 0, the last mark and all values after it.
  Indices pop_values(size_t count) {
    check(available() >= count, "values are missing on the stack");
    if (count == 0) {
      check(!marks_.empty(), "a mark is missing on the stack");
      count = available();
      marks_.pop_back();
    }
    const auto begin = stack_.end() - static_cast<std::ptrdiff_t>(count);
    Indices values(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    return values;
  }

  // ---- instructions. A parameter named `bytes` is the size of the number that follows the instruction. For texts,
  // bytes and long integers, this number is the size of the value that follows the number.
  void push_none(size_t) { push(0); }
  void push_bool(size_t value) { push(make(Kind::boolean, static_cast<int64_t>(value))); }
  void push_unsigned(size_t bytes) { push(make(Kind::integer, static_cast<int64_t>(take_unsigned(bytes)))); }
  void push_signed(size_t bytes) { push(make_integer(take(bytes))); }
  void push_long(size_t bytes) { push(make_integer(take(take_unsigned(bytes)))); }
  void push_text(size_t bytes) { push(make_text(Kind::text, take(take_unsigned(bytes)))); }
  void push_bytes(size_t bytes) { push(make_text(Kind::bytes, take(take_unsigned(bytes)))); }
  void push_big_endian_double(size_t bytes) {
    push(make_number(std::bit_cast<double>(__builtin_bswap64(take_unsigned(bytes)))));
  }
  void push_decimal(size_t) {
    std::string_view line = take_line();
    if (line == "00" || line == "01") return push_bool(line == "01");
    if (line.ends_with('L')) line.remove_suffix(1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    check(error != std::errc::invalid_argument && end == line.data() + line.size(), "expected an integer, found ",
          in_quotes(line));
    push(error == std::errc() ? make(Kind::integer, value) : make(Kind::object, class_int));
  }
  void read_protocol(size_t bytes) { check(take_unsigned(bytes) <= 5, "unknown protocol"); }
  void read_frame(size_t bytes) { check(take_unsigned(bytes) <= pickle_.size() - position_, "a frame is truncated"); }
  void push_mark(size_t) { marks_.push_back(stack_.size()); }
  void discard(size_t) {
    if (!marks_.empty() && available() == 0)
      marks_.pop_back();
    else
      pop();
  }
  void discard_to_mark(size_t) { pop_values(0); }
  void duplicate(size_t) { push(top()); }
  void put(size_t bytes) {
    const uint64_t key = bytes > 0 ? take_unsigned(bytes) : memo_.size();
    memo_[key] = top();
  }
  void get(size_t bytes) {
    const auto found = memo_.find(take_unsigned(bytes));
    check(found != memo_.end(), "a memo entry is missing");
    push(found->second);
  }
  void push_empty(size_t kind) { push(make(static_cast<Kind>(kind), Indices())); }
  void push_list(size_t) { push(make(Kind::list, pop_values(0))); }
  void push_tuple(size_t count) { push(make(Kind::tuple, pop_values(count))); }
  void push_set(size_t) { push(make(Kind::object, class_set)); }
  void push_frozenset(size_t) {
    pop_values(0);
    push(make(Kind::object, class_frozenset));
  }
  void extend_list(size_t count) { extend(Kind::list, pop_values(count)); }
  void extend_dict(size_t count) { extend(Kind::dict, pop_values(count)); }
  /// Appends to the container on top of the stack. Discards the values if the container is an object (PtValue::Kind).
  void extend(Kind kind, const Indices& values) {
    PickledNode& container = node(top());
    if (container.kind == Kind::object) return;
    check(container.kind == kind, "items cannot be added to ", graph_.describe(top()));
    check(kind == Kind::list || values.size() % 2 == 0, "the value of a key is missing");
    container.children.insert(container.children.end(), values.begin(), values.end());
  }
  void push_global(size_t) {
    const std::string_view module = take_line();
    push(make_global(module, take_line()));
  }
  void push_stack_global(size_t) {
    const Indices names = pop_values(2);
    push(make_global(text(names[0], "a module"), text(names[1], "a class")));
  }
  void call(size_t count);
  /// Discards the state of an object, except the byte order of a NumPy dtype.
  void set_state(size_t) {
    const uint32_t state = pop();
    PickledNode& object = node(top());
    if (object.role != Role::numpy_dtype) return;
    const Indices& values = items(state, "the state of a NumPy dtype");
    const bool is_little_endian = values.size() >= 2 && text(values[1], "a byte order") != ">";
    if (!is_little_endian) object.role = Role::plain;  // scalars of this dtype become objects
  }
  void push_storage(size_t) { push(make_storage(pop())); }

  const InputFile& file_;
  const ZipFile& zip_;
  const std::string& folder_;
  std::string_view pickle_;
  PickledGraph graph_;
  size_t text_bytes_ = 0;
  std::unordered_map<std::string, uint32_t> storages_;  ///< indices by key
  size_t position_ = 0;
  Indices stack_;
  std::vector<size_t> marks_;  ///< the size of the stack at each mark
  std::unordered_map<uint64_t, uint32_t> memo_;
};

using U = Unpickler;

const U::Function U::kFunctions[] = {
    {"collections.OrderedDict", 0, &U::make_dict},
    {"torch._utils._rebuild_tensor_v2", 4, &U::make_tensor},
    {"torch._utils._rebuild_tensor_v3", 7, &U::make_tensor},
    {"torch._utils._rebuild_parameter", 1, &U::first_argument},
    {"torch._utils._rebuild_parameter_with_state", 1, &U::first_argument},
    {"torch.Size", 1, &U::first_argument},
    {"torch.device", 1, &U::make_device},
    {"numpy.dtype", 1, &U::make_numpy_dtype},
    {"numpy.core.multiarray.scalar", 2, &U::make_numpy_scalar},
    {"numpy._core.multiarray.scalar", 2, &U::make_numpy_scalar},
    {"_codecs.encode", 2, &U::make_bytes},
};

// clang-format off
const U::Instruction U::kInstructions[] = {
    {'N', &U::push_none}, {0x88, &U::push_bool, 1}, {0x89, &U::push_bool, 0},
    {'K', &U::push_unsigned, 1}, {'M', &U::push_unsigned, 2}, {'J', &U::push_signed, 4},
    {0x8a, &U::push_long, 1}, {0x8b, &U::push_long, 4}, {'I', &U::push_decimal}, {'L', &U::push_decimal},
    {'G', &U::push_big_endian_double, 8},
    {'U', &U::push_text, 1}, {0x8c, &U::push_text, 1}, {'T', &U::push_text, 4}, {'X', &U::push_text, 4},
    {0x8d, &U::push_text, 8},
    {'C', &U::push_bytes, 1}, {'B', &U::push_bytes, 4}, {0x8e, &U::push_bytes, 8}, {0x96, &U::push_bytes, 8},
    {0x80, &U::read_protocol, 1}, {0x95, &U::read_frame, 8},
    {'(', &U::push_mark}, {'0', &U::discard}, {'1', &U::discard_to_mark}, {'2', &U::duplicate},
    {0x94, &U::put, 0}, {'q', &U::put, 1}, {'r', &U::put, 4}, {'h', &U::get, 1}, {'j', &U::get, 4},
    {']', &U::push_empty, size_t(Kind::list)}, {'}', &U::push_empty, size_t(Kind::dict)},
    {')', &U::push_empty, size_t(Kind::tuple)},
    {'t', &U::push_tuple, 0}, {0x85, &U::push_tuple, 1}, {0x86, &U::push_tuple, 2}, {0x87, &U::push_tuple, 3},
    {'l', &U::push_list}, {0x8f, &U::push_set}, {0x91, &U::push_frozenset},
    {'a', &U::extend_list, 1}, {'e', &U::extend_list, 0}, {0x90, &U::extend_list, 0},
    {'s', &U::extend_dict, 2}, {'u', &U::extend_dict, 0},
    {'c', &U::push_global}, {0x93, &U::push_stack_global},
    {'R', &U::call, 2}, {0x81, &U::call, 2}, {0x92, &U::call, 3},
    {'b', &U::set_state}, {'Q', &U::push_storage},
};
// clang-format on

/// Calls a function, with keyword arguments if `count` is 3. If the function is not in kFunctions or cannot be
/// evaluated, the result is an object of the class that the function names.
void Unpickler::call(size_t count) {
  const Indices operands = pop_values(count);
  const PickledNode callee = node(operands[0]);
  check(callee.kind == Kind::object, "expected a class or function, found ", graph_.describe(operands[0]));
  const bool is_short = items(operands[1], "arguments").size() <= kMaxArguments;
  const Indices values = is_short ? node(operands[1]).children : Indices();
  std::optional<uint32_t> result;
  for (const Function& known : kFunctions) {
    if (callee.role != Role::global || count == 3 || graph_.text(operands[0]) != known.name) continue;
    check(values.size() >= known.min_arguments, known.name, " has too few or too many arguments");
    result = (this->*known.call)(values);
  }
  push(result ? *result : make(Kind::object, callee.value));
}

PickledGraph Unpickler::run() {
  for (;;) {
    const auto code = static_cast<uint8_t>(take_unsigned(1));
    if (code == '.') break;
    const auto* known = std::ranges::find(kInstructions, code, &Instruction::code);
    check(known != std::end(kInstructions), "unknown instruction ", int{code});
    (this->*known->run)(known->argument);
  }
  graph_.root = pop();
  return std::move(graph_);
}

}  // namespace

std::string PickledGraph::describe(uint32_t node) const {
  constexpr const char* kNames[] = {"None",   "a bool",  "an integer", "a number", "a text",   "bytes",
                                    "a list", "a tuple", "a dict",     "a tensor", "an object"};
  const char* name = kNames[static_cast<size_t>(nodes[node].kind)];
  return nodes[node].kind == Kind::object ? concat(name, " of class ", in_quotes(text(node))) : name;
}

PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle) {
  return Unpickler(file, zip, folder, pickle).run();
}

}  // namespace voxgrad
