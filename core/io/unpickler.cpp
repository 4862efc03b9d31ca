// Interprets the instructions of a Python pickle, which operate on a stack. The time of an instruction is proportional
// to its size in bytes or to the number of values that it removes from the stack. The time and memory of all
// instructions together are therefore proportional to the size of the pickle.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>

#include "core/io/detail/unpickler.h"

namespace voxgrad {
namespace {

using Kind = PtValue::Kind;
using Indices = PickleBuilder::Indices;

class Unpickler {
 public:
  Unpickler(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle)
      : file_(file), builder_(file, zip, folder, pickle.size()), pickle_(pickle) {}

  PickledGraph run();

 private:
  struct Instruction {
    uint8_t code;
    void (Unpickler::*run)(size_t argument);
    size_t argument = 0;
  };
  static const Instruction kInstructions[];

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
  void push_bool(size_t value) { push(builder_.make(Kind::boolean, static_cast<int64_t>(value))); }
  void push_unsigned(size_t bytes) { push(builder_.make(Kind::integer, static_cast<int64_t>(take_unsigned(bytes)))); }
  void push_signed(size_t bytes) { push(builder_.make_integer(take(bytes))); }
  void push_long(size_t bytes) { push(builder_.make_integer(take(take_unsigned(bytes)))); }
  void push_text(size_t bytes) { push(builder_.make_text(Kind::text, take(take_unsigned(bytes)))); }
  void push_bytes(size_t bytes) { push(builder_.make_text(Kind::bytes, take(take_unsigned(bytes)))); }
  void push_big_endian_double(size_t bytes) {
    push(builder_.make_number(std::bit_cast<double>(__builtin_bswap64(take_unsigned(bytes)))));
  }
  void push_decimal(size_t) {
    std::string_view line = take_line();
    if (line == "00" || line == "01") return push_bool(line == "01");
    if (line.ends_with('L')) line.remove_suffix(1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    check(error != std::errc::invalid_argument && end == line.data() + line.size(), "expected an integer, found ",
          in_quotes(line));
    push(error == std::errc() ? builder_.make(Kind::integer, value)
                              : builder_.make(Kind::object, PickleBuilder::class_int));
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
  void push_empty(size_t kind) { push(builder_.make(static_cast<Kind>(kind), Indices())); }
  void push_list(size_t) { push(builder_.make(Kind::list, pop_values(0))); }
  void push_tuple(size_t count) { push(builder_.make(Kind::tuple, pop_values(count))); }
  void push_set(size_t) { push(builder_.make(Kind::object, PickleBuilder::class_set)); }
  void push_frozenset(size_t) {
    pop_values(0);
    push(builder_.make(Kind::object, PickleBuilder::class_frozenset));
  }
  void extend_list(size_t count) { extend(Kind::list, pop_values(count)); }
  void extend_dict(size_t count) { extend(Kind::dict, pop_values(count)); }
  /// Appends to the container on top of the stack. Discards the values if the container is an object (PtValue::Kind).
  void extend(Kind kind, const Indices& values) {
    PickledNode& container = builder_.node(top());
    if (container.kind == Kind::object) return;
    check(container.kind == kind, "items cannot be added to ", builder_.graph.describe(top()));
    check(kind == Kind::list || values.size() % 2 == 0, "the value of a key is missing");
    container.children.insert(container.children.end(), values.begin(), values.end());
  }
  void push_global(size_t) {
    const std::string_view module = take_line();
    push(builder_.make_global(module, take_line()));
  }
  void push_stack_global(size_t) {
    const Indices names = pop_values(2);
    push(builder_.make_global(builder_.text(names[0], "a module"), builder_.text(names[1], "a class")));
  }
  void call(size_t count) {  // with keyword arguments if `count` is 3
    const Indices values = pop_values(count);
    push(builder_.call(values[0], values[1], count == 3));
  }
  void set_state(size_t) {
    const uint32_t state = pop();
    builder_.set_state(top(), state);
  }
  void push_storage(size_t) { push(builder_.make_storage(pop())); }

  const InputFile& file_;
  PickleBuilder builder_;
  std::string_view pickle_;
  size_t position_ = 0;
  Indices stack_;
  std::vector<size_t> marks_;  ///< the size of the stack at each mark
  std::unordered_map<uint64_t, uint32_t> memo_;
};

using U = Unpickler;

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

PickledGraph Unpickler::run() {
  for (;;) {
    const auto code = static_cast<uint8_t>(take_unsigned(1));
    if (code == '.') break;
    const auto* known = std::find_if(std::begin(kInstructions), std::end(kInstructions),
                                     [&](const Instruction& instruction) { return instruction.code == code; });
    check(known != std::end(kInstructions), "unknown instruction ", int{code});
    (this->*known->run)(known->argument);
  }
  builder_.graph.root = pop();
  return std::move(builder_.graph);
}

}  // namespace

PickledGraph unpickle(const InputFile& file, const ZipFile& zip, const std::string& folder, std::string_view pickle) {
  return Unpickler(file, zip, folder, pickle).run();
}

}  // namespace voxgrad
