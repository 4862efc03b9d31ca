// Implements the checked reader of JSON files.
#include "examples/nnunet/json.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <set>

namespace nnunet {

namespace {

constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxKeyBytes = 256;
constexpr size_t kMaxKeys = 4096;  // per object, because nlohmann::ordered_json searches the keys one after another
constexpr size_t kMaxValues = 1 << 18;  // per file
constexpr size_t kMaxShown = 200;       // bytes of a value in an error message

/// Returns the JSON text of a value, abbreviated.
std::string shown(const nlohmann::ordered_json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (text.size() > kMaxShown) text.replace(kMaxShown, std::string::npos, "...");
  return text;
}

/// Implements nlohmann::json_sax: builds the document and checks its limits. The time is proportional to the size of
/// the text. nlohmann::json's own builder takes quadratic time for nested arrays. Functions return true
/// to continue, and throw in case of an error.
class Builder {
 public:
  using Document = nlohmann::ordered_json;
  explicit Builder(const std::filesystem::path& path) : path_(path) {}

  Document take_document() { return std::move(document_); }

  bool null() { return add({}); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& text) { return add(std::move(text)); }
  bool binary(Document::binary_t&) { return false; }  // does not occur in JSON text
  bool start_object(size_t) { return open(Document::object()); }
  bool start_array(size_t) { return open(Document::array()); }
  bool key(std::string& key) {
    check(key.size() <= kMaxKeyBytes, " has a key of more than ", kMaxKeyBytes, " bytes");
    check(open_.back().keys.size() < kMaxKeys, " has an object of more than ", kMaxKeys, " keys");
    if (!open_.back().keys.insert(key).second) fail(": the key ", shown(key), " occurs twice");
    key_ = std::move(key);
    return true;
  }
  bool end_object() { return end_array(); }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Document::exception&) {
    fail(" is not valid JSON at byte ", position);
  }

 private:
  /// An object or array that contains the next value.
  struct Level {
    Document* value;
    std::set<std::string> keys{};
  };
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    voxgrad::fail("nnU-Net", "'", path_.string(), "'", parts...);
  }
  template <class... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) fail(parts...);
  }
  bool add(Document value) {
    check(++values_ <= kMaxValues, " has more than ", kMaxValues, " values");
    last_ = &document_;
    if (open_.empty()) {
      document_ = std::move(value);
      return true;
    }
    if (Document& parent = *open_.back().value; parent.is_object()) {
      auto& members = parent.get_ref<Document::object_t&>();
      members.emplace_back(std::move(key_), std::move(value));  // key() has rejected duplicate keys
      last_ = &members.back().second;
    } else {
      parent.push_back(std::move(value));
      last_ = &parent.back();
    }
    return true;
  }
  bool open(Document value) {
    check(open_.size() < kMaxDepth, " has more than ", kMaxDepth, " levels");
    add(std::move(value));
    open_.push_back({last_});
    return true;
  }

  const std::filesystem::path& path_;
  Document document_;
  std::vector<Level> open_;
  std::string key_;           // key of the next value
  Document* last_ = nullptr;  // the value that add() added last
  size_t values_ = 0;
};

}  // namespace

Json Json::load(const std::filesystem::path& path) {
  constexpr uintmax_t kMaxSize = uintmax_t{1} << 26;
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  voxgrad::check(!error && stream, "nnU-Net", "cannot read '", path.string(), "'",
                 error ? ": " + error.message() : std::string());
  voxgrad::check(size <= kMaxSize, "nnU-Net", "'", path.string(), "' has ", size, " bytes, more than ", kMaxSize);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  Builder builder(path);
  Document::sax_parse(text, &builder);
  auto file = std::make_shared<File>(File{path, builder.take_document()});
  return {file, &file->document, {}};
}

Json Json::merged(const std::vector<Json>& chain) {
  auto file = std::make_shared<File>(File{chain[0].file_->path, Document::object()});
  for (const Json& link : chain)
    for (const auto& [key, value] : link.members()) {
      if (!file->document.contains(key)) file->document[key] = *value.value_;
      chain[0].check(file->document.size() <= kMaxKeys, "inherits more than ", kMaxKeys, " keys");
    }
  return {file, &file->document, chain[0].where_};
}

void Json::check_supported(bool condition, const std::string& supported) const {
  if (!condition) fail("is ", shown(*value_), "; supported: ", supported);
}

std::string Json::place() const {
  return voxgrad::concat("'", file_->path.string(), where_.empty() ? "' " : "': ", where_, where_.empty() ? "" : " ");
}

void Json::expect(bool good, const char* expected) const {
  if (!good) fail("must be ", expected, ", is ", value_->is_structured() ? value_->type_name() : shown(*value_));
}

Json Json::member(const std::string& key, const Document& value) const {
  return {file_, &value, where_.empty() ? key : where_ + '.' + key};
}

Json Json::at(const std::string& key) const {
  expect(is_object(), "an object");
  const auto found = value_->find(key);
  check(found != value_->end(), "has no \"", key, '"');
  return member(key, *found);
}

Json Json::find(const std::string& key) const {
  static const Document kNull;
  expect(is_object(), "an object");
  const auto found = value_->find(key);
  return member(key, found == value_->end() ? kNull : *found);
}

bool Json::boolean() const {
  expect(value_->is_boolean(), "true or false");
  return value_->get<bool>();
}

int64_t Json::integer() const {
  const bool unsigned_overflow = value_->is_number_unsigned() && value_->get<uint64_t>() > uint64_t{INT64_MAX};
  expect(is_integer() && !unsigned_overflow, "an integer");
  return value_->get<int64_t>();
}

double Json::number() const {
  expect(value_->is_number() && std::isfinite(value_->get<double>()), "a finite number");
  return value_->get<double>();
}

std::string Json::text() const {
  expect(is_text(), "a string");
  return value_->get<std::string>();
}

std::vector<Json> Json::items() const {
  expect(is_array(), "an array");
  std::vector<Json> list;
  for (const Document& item : *value_) list.push_back({file_, &item, voxgrad::concat(where_, '[', list.size(), ']')});
  return list;
}

std::vector<std::pair<std::string, Json>> Json::members() const {
  expect(is_object(), "an object");
  std::vector<std::pair<std::string, Json>> list;
  for (const auto& [key, value] : value_->items()) list.emplace_back(key, member(key, value));
  return list;
}

std::vector<double> Json::numbers(size_t count) const {
  std::vector<double> list;
  for (const Json& item : items()) list.push_back(item.number());
  check(list.size() == count, "must have ", count, " numbers, has ", list.size());
  return list;
}

}  // namespace nnunet
