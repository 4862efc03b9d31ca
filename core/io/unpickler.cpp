// The stack machine of Python's pickle module. Objects and calls are never executed: the few calls that build tensors
// and plain data are computed here, and all others become opaque objects. Each instruction takes time and memory in
// proportion to its bytes in the file, except that texts which calls derive from others count towards a limit.
#include "core/io/detail/unpickler.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>

namespace voxgrad {
namespace {

using Kind = PtValue::Kind;
using Role = PickledNode::Role;
using Indices = std::vector<uint32_t>;

constexpr size_t kMaxNodes = 4'000'000;
constexpr size_t kMaxKey = 100;  // characters of the key of a storage, or of a type of device
constexpr size_t kMaxArguments = 8;

struct StorageType {
  std::string_view name;
  DType dtype;
};
constexpr StorageType kStorageTypes[] = {{"torch.FloatStorage", f32}, {"torch.DoubleStorage", f64},
                                         {"torch.HalfStorage", f16},  {"torch.BFloat16Storage", bf16},
                                         {"torch.LongStorage", i64},  {"torch.IntStorage", i32},
                                         {"torch.ByteStorage", u8},   {"torch.BoolStorage", b8}};

constexpr std::string_view kTorchDtypes[] = {"float32",       "float64",     "float16",         "bfloat16",
                                             "int64",         "int32",       "int16",           "int8",
                                             "uint8",         "uint16",      "uint32",          "uint64",
                                             "bool",          "complex32",   "complex64",       "complex128",
                                             "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                                             "qint8",         "quint8",      "qint32"};

class Unpickler {
 public:
  Unpickler(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle)
      : file_(file), zip_(zip), folder_(folder), pickle_(pickle) {}

  PickledGraph run();

 private:
  using Call = std::optional<uint32_t> (Unpickler::*)(const Indices& arguments);
  struct Function {
    std::string_view name;
    size_t num_arguments;  ///< at least
    Call call;
  };
  static const Function kFunctions[];

  // ---- messages and bytes
  template <class... Args>
  void check(bool condition, const Args&... args) const {
    file_.check(condition, "the pickle is malformed at byte ", position_, ": ", args...);
  }
  std::string_view take(uint64_t count) {
    check(count <= pickle_.size() - position_, "truncated, or a length exceeds the file");
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
    const std::string_view line = take(end - position_);
    ++position_;
    return line;
  }

  // ---- values
  PickledNode& node(uint32_t index) { return graph_.nodes[index]; }
  bool is_sequence(uint32_t index) { return node(index).kind == Kind::list || node(index).kind == Kind::tuple; }
  uint32_t add(PickledNode node);
  uint32_t add_text(std::string_view text);
  uint32_t make(Kind kind, int64_t value) { return add({.kind = kind, .value = value}); }
  uint32_t make(Kind kind, Indices children) { return add({.kind = kind, .children = std::move(children)}); }
  uint32_t make_text(Kind kind, std::string_view text) { return make(kind, int64_t{add_text(text)}); }
  uint32_t make_number(double value) { return make(Kind::number, std::bit_cast<int64_t>(value)); }
  uint32_t make_object(std::string_view name, Role role = Role::plain) {
    return add({.kind = Kind::object, .role = role, .value = add_text(name)});
  }
  uint32_t make_global(std::string_view module, std::string_view name);
  uint32_t make_long(std::string_view bytes);
  uint32_t make_decimal(std::string_view text);
  int64_t integer(uint32_t index, const char* what);
  const std::string& text(uint32_t index, const char* what);
  void check_keys() const;

  // ---- the stack
  void push(uint32_t index) { stack_.push_back(index); }
  uint32_t pop();
  uint32_t& top();
  Indices pop_last(size_t count);
  Indices pop_to_mark();

  // ---- instructions, by their bytes. The functions return false for other bytes.
  bool run_literal(uint8_t op);
  bool run_stack(uint8_t op);
  bool run_container(uint8_t op);
  bool run_call(uint8_t op);
  void extend(Kind kind, const Indices& children);
  uint32_t get(uint64_t key);

  // ---- calls. Functions without a result leave the call to make_object().
  uint32_t call(uint32_t function, uint32_t arguments);
  void build(uint32_t object, uint32_t state);
  uint32_t load_persistent(uint32_t id);
  std::optional<uint32_t> ordered_dict(const Indices& arguments);
  std::optional<uint32_t> rebuild_tensor(const Indices& arguments);
  std::optional<uint32_t> rebuild_tensor_v3(const Indices& arguments);
  std::optional<uint32_t> first_tensor(const Indices& arguments);
  std::optional<uint32_t> torch_size(const Indices& arguments);
  std::optional<uint32_t> torch_device(const Indices& arguments);
  std::optional<uint32_t> numpy_dtype(const Indices& arguments);
  std::optional<uint32_t> numpy_scalar(const Indices& arguments);
  std::optional<uint32_t> encode_latin1(const Indices& arguments);
  void set_geometry(PickledTensor& tensor, const Indices& sizes, const Indices& strides);
  uint32_t add_tensor(PickledTensor tensor);

  const InputFile& file_;
  const ZipFile& zip_;
  const std::string& folder_;
  std::string_view pickle_;
  size_t position_ = 0;
  size_t text_bytes_ = 0;
  PickledGraph graph_;
  Indices stack_;
  std::vector<size_t> marks_;  ///< sizes of stack_
  std::unordered_map<uint64_t, uint32_t> memo_;
  std::unordered_map<std::string_view, uint32_t> storages_;  ///< by key
};

const Unpickler::Function Unpickler::kFunctions[] = {
    {"collections.OrderedDict", 0, &Unpickler::ordered_dict},
    {"torch._utils._rebuild_tensor_v2", 4, &Unpickler::rebuild_tensor},
    {"torch._utils._rebuild_tensor_v3", 7, &Unpickler::rebuild_tensor_v3},
    {"torch._utils._rebuild_parameter", 1, &Unpickler::first_tensor},
    {"torch._utils._rebuild_parameter_with_state", 1, &Unpickler::first_tensor},
    {"torch.Size", 1, &Unpickler::torch_size},
    {"torch.device", 1, &Unpickler::torch_device},
    {"numpy.dtype", 1, &Unpickler::numpy_dtype},
    {"numpy.core.multiarray.scalar", 2, &Unpickler::numpy_scalar},
    {"numpy._core.multiarray.scalar", 2, &Unpickler::numpy_scalar},
    {"_codecs.encode", 2, &Unpickler::encode_latin1},
};

PickledGraph Unpickler::run() {
  add({});
  for (;;) {
    const auto op = static_cast<uint8_t>(take_unsigned(1));
    if (op == '.') break;
    check(run_literal(op) || run_stack(op) || run_container(op) || run_call(op), "unknown instruction ", int{op});
  }
  graph_.root = pop();
  check_keys();
  return std::move(graph_);
}

// ---- values

uint32_t Unpickler::add(PickledNode node) {
  file_.check(graph_.nodes.size() < kMaxNodes, "the pickle has more than ", kMaxNodes, " values");
  graph_.nodes.push_back(std::move(node));
  return static_cast<uint32_t>(graph_.nodes.size() - 1);
}

uint32_t Unpickler::add_text(std::string_view text) {
  text_bytes_ += text.size();
  file_.check(text_bytes_ / 4 <= pickle_.size(), "the texts of the pickle take more than four times its size");
  const auto [place, is_new] = graph_.text_indices.emplace(text, static_cast<uint32_t>(graph_.texts.size()));
  if (is_new) graph_.texts.push_back(&place->first);
  return place->second;
}

uint32_t Unpickler::make_global(std::string_view module, std::string_view name) {
  const bool is_dtype =
      module == "torch" && std::find(std::begin(kTorchDtypes), std::end(kTorchDtypes), name) != std::end(kTorchDtypes);
  std::string full(module);
  full += '.';
  full += name;
  return is_dtype ? make_text(Kind::text, full) : make_object(full, Role::global);
}

/// Converts a little-endian two's complement number.
uint32_t Unpickler::make_long(std::string_view bytes) {
  const char sign = !bytes.empty() && bytes.back() < 0 ? '\xff' : '\0';
  while (bytes.size() > 8 && bytes.back() == sign) bytes.remove_suffix(1);
  if (bytes.size() > 8) return make_object("int");
  int64_t value = sign;
  std::memcpy(&value, bytes.data(), bytes.size());
  if (bytes.size() == 8 && (value < 0) != (sign != 0)) return make_object("int");
  return make(Kind::integer, value);
}

uint32_t Unpickler::make_decimal(std::string_view text) {
  if (text.ends_with('L')) text.remove_suffix(1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error != std::errc::invalid_argument && end == text.data() + text.size(), "expected an integer, found ",
        in_quotes(text));
  return error == std::errc() ? make(Kind::integer, value) : make_object("int");
}

int64_t Unpickler::integer(uint32_t index, const char* what) {
  check(node(index).kind == Kind::integer, what, " must be an integer, found ", describe(graph_, index));
  return node(index).value;
}

const std::string& Unpickler::text(uint32_t index, const char* what) {
  check(node(index).kind == Kind::text, what, " must be a text, found ", describe(graph_, index));
  return graph_.text(index);
}

/// Throws if a dict has equal keys, which readers could interpret differently.
void Unpickler::check_keys() const {
  std::vector<std::pair<Kind, int64_t>> keys;
  for (const PickledNode& dict : graph_.nodes) {
    if (dict.kind != Kind::dict) continue;
    keys.clear();
    for (size_t i = 0; i < dict.children.size(); i += 2) {
      const PickledNode& key = graph_.nodes[dict.children[i]];
      if (key.kind == Kind::text || key.kind == Kind::integer) keys.emplace_back(key.kind, key.value);
    }
    std::sort(keys.begin(), keys.end());
    const auto repeated = std::adjacent_find(keys.begin(), keys.end());
    if (repeated == keys.end()) continue;
    if (repeated->first == Kind::integer) file_.fail("a dict has the key ", repeated->second, " twice");
    file_.fail("a dict has the key ", in_quotes(*graph_.texts[static_cast<size_t>(repeated->second)]), " twice");
  }
}

// ---- the stack

uint32_t& Unpickler::top() {
  check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "a value is missing on the stack");
  return stack_.back();
}

uint32_t Unpickler::pop() {
  const uint32_t index = top();
  stack_.pop_back();
  return index;
}

Indices Unpickler::pop_last(size_t count) {
  check(stack_.size() - (marks_.empty() ? 0 : marks_.back()) >= count, "values are missing on the stack");
  const auto begin = stack_.end() - static_cast<std::ptrdiff_t>(count);
  Indices items(begin, stack_.end());
  stack_.erase(begin, stack_.end());
  return items;
}

Indices Unpickler::pop_to_mark() {
  check(!marks_.empty(), "a mark is missing");
  Indices items = pop_last(stack_.size() - marks_.back());
  marks_.pop_back();
  return items;
}

// ---- instructions

bool Unpickler::run_literal(uint8_t op) {
  const auto text_of = [&](size_t length_bytes) {
    push(make_text(Kind::text, take(take_unsigned(length_bytes))));
    return true;
  };
  const auto bytes_of = [&](size_t length_bytes) {
    push(make_text(Kind::bytes, take(take_unsigned(length_bytes))));
    return true;
  };
  const auto integer_of = [&](int64_t value) {
    push(make(Kind::integer, value));
    return true;
  };
  switch (op) {
    case 'N':
      push(0);
      return true;
    case 0x88:
      push(make(Kind::boolean, 1));
      return true;
    case 0x89:
      push(make(Kind::boolean, 0));
      return true;
    case 'K':
      return integer_of(static_cast<int64_t>(take_unsigned(1)));
    case 'M':
      return integer_of(static_cast<int64_t>(take_unsigned(2)));
    case 'J':
      return integer_of(static_cast<int32_t>(take_unsigned(4)));
    case 0x8a:
      push(make_long(take(take_unsigned(1))));
      return true;
    case 0x8b:
      push(make_long(take(take_unsigned(4))));
      return true;
    case 'L':
      push(make_decimal(take_line()));
      return true;
    case 'I': {
      const std::string_view line = take_line();
      push(line == "00" || line == "01" ? make(Kind::boolean, line == "01") : make_decimal(line));
      return true;
    }
    case 'G': {
      std::string bytes(take(8));
      std::reverse(bytes.begin(), bytes.end());
      double value;
      std::memcpy(&value, bytes.data(), 8);
      push(make_number(value));
      return true;
    }
    case 'U':
    case 0x8c:
      return text_of(1);
    case 'T':
    case 'X':
      return text_of(4);
    case 0x8d:
      return text_of(8);
    case 'C':
      return bytes_of(1);
    case 'B':
      return bytes_of(4);
    case 0x8e:
    case 0x96:
      return bytes_of(8);
    default:
      return false;
  }
}

bool Unpickler::run_stack(uint8_t op) {
  switch (op) {
    case 0x80: {
      const uint64_t protocol = take_unsigned(1);
      check(protocol <= 5, "unknown protocol ", protocol);
      return true;
    }
    case 0x95:
      check(take_unsigned(8) <= pickle_.size() - position_, "a frame is truncated");
      return true;
    case '(':
      marks_.push_back(stack_.size());
      return true;
    case '0':
      if (!marks_.empty() && marks_.back() == stack_.size())
        marks_.pop_back();
      else
        pop();
      return true;
    case '1':
      pop_to_mark();
      return true;
    case '2':
      push(top());
      return true;
    case 'p': {
      const uint32_t key = make_decimal(take_line());
      memo_[static_cast<uint64_t>(integer(key, "a memo key"))] = top();
      return true;
    }
    case 'q': {
      const uint64_t key = take_unsigned(1);
      memo_[key] = top();
      return true;
    }
    case 'r': {
      const uint64_t key = take_unsigned(4);
      memo_[key] = top();
      return true;
    }
    case 0x94:
      memo_[memo_.size()] = top();
      return true;
    case 'g':
      push(get(static_cast<uint64_t>(integer(make_decimal(take_line()), "a memo key"))));
      return true;
    case 'h':
      push(get(take_unsigned(1)));
      return true;
    case 'j':
      push(get(take_unsigned(4)));
      return true;
    default:
      return false;
  }
}

uint32_t Unpickler::get(uint64_t key) {
  const auto found = memo_.find(key);
  check(found != memo_.end(), "memo ", key, " is missing");
  return found->second;
}

/// Appends to the list or dict on top of the stack. Objects discard their items.
void Unpickler::extend(Kind kind, const Indices& children) {
  PickledNode& container = node(top());
  if (container.kind == Kind::object) return;
  check(container.kind == kind, "expected ", kind == Kind::list ? "a list" : "a dict", ", found ",
        describe(graph_, top()));
  check(kind == Kind::list || children.size() % 2 == 0, "the value of a key is missing");
  container.children.insert(container.children.end(), children.begin(), children.end());
}

bool Unpickler::run_container(uint8_t op) {
  switch (op) {
    case ']':
      push(make(Kind::list, Indices()));
      return true;
    case '}':
      push(make(Kind::dict, Indices()));
      return true;
    case ')':
      push(make(Kind::tuple, Indices()));
      return true;
    case 0x8f:
      push(make_object("builtins.set"));
      return true;
    case 'l':
      push(make(Kind::list, pop_to_mark()));
      return true;
    case 't':
      push(make(Kind::tuple, pop_to_mark()));
      return true;
    case 'd': {
      Indices members = pop_to_mark();
      push(make(Kind::dict, Indices()));
      extend(Kind::dict, members);
      return true;
    }
    case 0x91:
      pop_to_mark();
      push(make_object("builtins.frozenset"));
      return true;
    case 0x85:
    case 0x86:
    case 0x87:
      push(make(Kind::tuple, pop_last(op - 0x84u)));
      return true;
    case 'a':
      extend(Kind::list, pop_last(1));
      return true;
    case 'e':
    case 0x90:
      extend(Kind::list, pop_to_mark());
      return true;
    case 's':
      extend(Kind::dict, pop_last(2));
      return true;
    case 'u':
      extend(Kind::dict, pop_to_mark());
      return true;
    default:
      return false;
  }
}

bool Unpickler::run_call(uint8_t op) {
  Indices items;
  switch (op) {
    case 'c': {
      const std::string_view module = take_line();
      push(make_global(module, take_line()));
      return true;
    }
    case 0x93:
      items = pop_last(2);
      push(make_global(text(items[0], "a module"), text(items[1], "a global")));
      return true;
    case 'R':
    case 0x81:
      items = pop_last(2);
      push(call(items[0], items[1]));
      return true;
    case 0x92:  // with a dict of keyword arguments, which no supported call needs
      items = pop_last(3);
      push(call(items[0], 0));
      return true;
    case 'i': {
      const std::string_view module = take_line();
      const uint32_t name = make_global(module, take_line());
      pop_to_mark();
      push(call(name, 0));
      return true;
    }
    case 'o':
      items = pop_to_mark();
      check(!items.empty(), "a class is missing");
      push(call(items[0], 0));
      return true;
    case 'b':
      items = pop_last(1);
      build(top(), items[0]);
      return true;
    case 'Q':
      push(load_persistent(pop()));
      return true;
    default:
      return false;
  }
}

// ---- calls

/// Returns the result of a call. `arguments` is a tuple, or None if no supported call has these arguments.
uint32_t Unpickler::call(uint32_t function, uint32_t arguments) {
  const PickledNode callee = node(function);
  check(callee.kind == Kind::object, "expected a class or function, found ", describe(graph_, function));
  if (arguments != 0) {
    check(node(arguments).kind == Kind::tuple, "arguments must be a tuple, found ", describe(graph_, arguments));
    if (callee.role == Role::global && node(arguments).children.size() <= kMaxArguments) {
      const Indices items = node(arguments).children;
      const std::string& name = graph_.text(callee);
      for (const Function& known : kFunctions) {
        if (name != known.name) continue;
        check(items.size() >= known.num_arguments, name, " needs ", known.num_arguments, " arguments, found ",
              items.size());
        if (const auto result = (this->*known.call)(items)) return *result;
      }
    }
  }
  return add({.kind = Kind::object, .value = callee.value});
}

/// Sets the state of an object. Only that of a NumPy dtype matters: it contains the byte order.
void Unpickler::build(uint32_t object, uint32_t state) {
  if (node(object).role != Role::numpy_dtype || node(state).kind != Kind::tuple) return;
  const Indices& items = node(state).children;
  check(items.size() >= 2, "the state of a NumPy dtype is too short");
  const std::string& order = text(items[1], "a byte order");
  if (order == ">") node(object).role = Role::plain;  // big-endian scalars are opaque
}

/// Returns the object for ('storage', type, key, location, numel).
uint32_t Unpickler::load_persistent(uint32_t id) {
  check(is_sequence(id) && node(id).children.size() == 5, "a persistent id must be a tuple of 5 items, found ",
        describe(graph_, id));
  const Indices items = node(id).children;
  check(text(items[0], "the first item of a persistent id") == "storage", "unknown persistent id ",
        in_quotes(graph_.text(items[0])));
  const PickledNode type = node(items[1]);
  check(type.kind == Kind::object && type.role == Role::global && graph_.text(type).starts_with("torch.") &&
            graph_.text(type).ends_with("Storage"),
        "the type of a storage must be a class of PyTorch, found ", describe(graph_, items[1]));
  const std::string& key = text(items[2], "the key of a storage");
  const int64_t numel = integer(items[4], "the size of a storage");
  check(key.size() <= kMaxKey && numel >= 0, "storage ", in_quotes(key), " has ", numel, " elements");
  const auto [place, is_new] = storages_.emplace(key, static_cast<uint32_t>(graph_.storages.size()));
  if (is_new) {
    PickledStorage storage{.key = key, .type = static_cast<uint32_t>(type.value), .numel = numel};
    for (const auto& [name, dtype] : kStorageTypes) {
      if (graph_.text(type) != name) continue;
      storage.dtype = dtype;
      storage.range = zip_.find(concat(folder_, "/data/", key));
      const int64_t size = storage.range.size, item = item_size(dtype);
      check(size % item == 0 && size / item == numel, "storage ", in_quotes(key), " should have ", numel,
            " elements of ", dtype, ", but its entry has ", size, " bytes");
    }
    graph_.storages.push_back(storage);
  }
  const PickledStorage& storage = graph_.storages[place->second];
  check(storage.type == static_cast<uint32_t>(type.value) && storage.numel == numel, "storage ", in_quotes(key),
        " has two types or sizes");
  return add({.kind = Kind::object, .role = Role::storage, .detail = place->second, .value = type.value});
}

std::optional<uint32_t> Unpickler::ordered_dict(const Indices& arguments) {
  if (!arguments.empty()) return {};
  return make(Kind::dict, Indices());
}

std::optional<uint32_t> Unpickler::first_tensor(const Indices& arguments) {
  if (node(arguments[0]).kind != Kind::tensor) return {};  // a parameter of an unsupported class of tensors
  return arguments[0];
}

uint32_t Unpickler::add_tensor(PickledTensor tensor) {
  file_.check(graph_.tensors.size() < kMaxPickledTensors, "more than ", kMaxPickledTensors, " tensors");
  graph_.tensors.push_back(std::move(tensor));
  return make(Kind::tensor, static_cast<int64_t>(graph_.tensors.size() - 1));
}

/// Arguments: storage, offset, sizes, strides, requires_grad, backward hooks, metadata.
std::optional<uint32_t> Unpickler::rebuild_tensor(const Indices& arguments) {
  const PickledNode& source = node(arguments[0]);
  check(source.role == Role::storage, "the first argument of a tensor must be a storage, found ",
        describe(graph_, arguments[0]));
  PickledTensor tensor{.storage = source.detail, .offset = integer(arguments[1], "the offset of a tensor")};
  const PickledStorage& storage = graph_.storages[tensor.storage];
  check(is_sequence(arguments[2]) && is_sequence(arguments[3]), "sizes and strides of a tensor must be tuples");
  const Indices& sizes = node(arguments[2]).children;
  const Indices& strides = node(arguments[3]).children;
  check(sizes.size() == strides.size(), "a tensor has ", sizes.size(), " sizes, but ", strides.size(), " strides");
  if (!storage.dtype)
    tensor.problem = concat("its elements are a ", in_quotes(*graph_.texts[storage.type]), ", which is not supported");
  else if (sizes.size() > kMaxRank)
    tensor.problem = concat("it has ", sizes.size(), " axes, at most ", kMaxRank, " are supported");
  else
    set_geometry(tensor, sizes, strides);
  // The metadata contains lazy negation and conjugation of the elements.
  if (arguments.size() > 6 && node(arguments[6]).kind == Kind::dict && !node(arguments[6]).children.empty())
    tensor.problem = "its elements are negated or conjugated lazily, which is not supported";
  return add_tensor(std::move(tensor));
}

/// Checks that all elements lie within the storage.
void Unpickler::set_geometry(PickledTensor& tensor, const Indices& sizes, const Indices& strides) {
  const PickledStorage& storage = graph_.storages[tensor.storage];
  const std::string what = concat("a tensor in storage ", in_quotes(storage.key), ": ");
  int64_t last = tensor.offset;
  bool overflow = false, negative = last < 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = integer(sizes[i], "a size"), stride = integer(strides[i], "a stride");
    tensor.shape.push_back(size);
    tensor.strides.push_back(stride);
    negative |= size < 0 || stride < 0;
    int64_t step = 0;
    if (size <= 1) continue;
    overflow |= __builtin_mul_overflow(size - 1, stride, &step);
    overflow |= __builtin_add_overflow(last, step, &last);
  }
  check(!negative, what, "shape ", tensor.shape, ", strides ", tensor.strides, " and offset ", tensor.offset,
        " must not be negative");
  claimed_bytes(file_, what, tensor.shape, name(*storage.dtype), 8 * item_size(*storage.dtype));
  if (numel(tensor.shape) == 0) {
    tensor.offset = 0;
    tensor.strides = contiguous_strides(tensor.shape);
    return;
  }
  check(!overflow && last < storage.numel, what, "shape ", tensor.shape, " with strides ", tensor.strides,
        " at offset ", tensor.offset, " reaches outside its ", storage.numel, " elements");
}

/// PyTorch writes this call for dtypes that have no class of storages. voxgrad supports none of these dtypes.
std::optional<uint32_t> Unpickler::rebuild_tensor_v3(const Indices& arguments) {
  check(node(arguments[0]).role == Role::storage, "the first argument of a tensor must be a storage, found ",
        describe(graph_, arguments[0]));
  const std::string& dtype = text(arguments[6], "the dtype of a tensor");
  return add_tensor(
      {.storage = node(arguments[0]).detail, .problem = concat("the dtype ", in_quotes(dtype), " is not supported")});
}

std::optional<uint32_t> Unpickler::torch_size(const Indices& arguments) {
  if (!is_sequence(arguments[0])) return {};
  if (node(arguments[0]).kind == Kind::tuple) return arguments[0];
  return make(Kind::tuple, node(arguments[0]).children);
}

std::optional<uint32_t> Unpickler::torch_device(const Indices& arguments) {
  const std::string& type = text(arguments[0], "the type of a device");
  check(type.size() <= kMaxKey, "unknown device ", in_quotes(type));
  if (arguments.size() == 1) return make_text(Kind::text, type);
  return make_text(Kind::text, concat(type, ':', integer(arguments[1], "the index of a device")));
}

std::optional<uint32_t> Unpickler::numpy_dtype(const Indices& arguments) {
  text(arguments[0], "a NumPy dtype");
  const uint32_t name = add_text("numpy.dtype");
  return add({.kind = Kind::object, .role = Role::numpy_dtype, .detail = arguments[0], .value = name});
}

/// Converts a scalar with the dtype and bytes in `arguments`.
std::optional<uint32_t> Unpickler::numpy_scalar(const Indices& arguments) {
  const PickledNode& dtype = node(arguments[0]);
  if (dtype.role != Role::numpy_dtype || node(arguments[1]).kind != Kind::bytes) return {};
  const std::string& bytes = graph_.text(arguments[1]);
  const std::string& code = graph_.text(dtype.detail);
  if (code.size() != 2 || std::string_view("fiub").find(code[0]) == std::string_view::npos) return {};
  const auto size = static_cast<size_t>(code[1] - '0');
  if (code != "f2" && code != "f4" && code != "f8" && code != "b1" &&
      !(code[0] != 'f' && code[0] != 'b' && (size == 1 || size == 2 || size == 4 || size == 8)))
    return {};
  check(bytes.size() == size, "a NumPy scalar of ", code, " has ", bytes.size(), " bytes");
  const auto as = [&]<class T>(T value) {
    std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof(T));
    return value;
  };
  if (code == "f2") return make_number(static_cast<float>(as(Float16())));
  if (code == "f4") return make_number(as(0.0f));
  if (code == "f8") return make_number(as(0.0));
  if (code == "b1") return make(Kind::boolean, bytes[0] != 0);
  return make_long(code[0] == 'u' ? bytes + '\0' : bytes);
}

/// Converts a text to bytes. With protocols up to 2, Python writes bytes as latin-1 text.
std::optional<uint32_t> Unpickler::encode_latin1(const Indices& arguments) {
  const std::string& encoding = text(arguments[1], "an encoding");
  if (encoding != "latin1" && encoding != "latin-1") return {};
  const std::string& utf8 = text(arguments[0], "a text to encode");
  std::string bytes;
  for (size_t i = 0; i < utf8.size(); ++i) {
    auto code = static_cast<unsigned char>(utf8[i]);
    if (code >= 0x80) {
      const auto next = i + 1 < utf8.size() ? static_cast<unsigned char>(utf8[++i]) : 0u;
      check((code == 0xc2 || code == 0xc3) && (next & 0xc0u) == 0x80, "a text is not latin-1");
      code = static_cast<unsigned char>((code & 3u) << 6 | (next & 0x3fu));
    }
    bytes += static_cast<char>(code);
  }
  return make_text(Kind::bytes, bytes);
}

}  // namespace

PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle) {
  return Unpickler(file, zip, folder, pickle).run();
}

std::string describe(const PickledGraph& graph, uint32_t node) {
  constexpr const char* kNames[] = {"None",   "a bool",  "an integer", "a number", "a text",   "bytes",
                                    "a list", "a tuple", "a dict",     "a tensor", "an object"};
  const PickledNode& value = graph.nodes[node];
  const char* name = kNames[static_cast<size_t>(value.kind)];
  return value.kind == Kind::object ? concat(name, " of class ", in_quotes(graph.text(value))) : name;
}

}  // namespace voxgrad
