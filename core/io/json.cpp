// Implements a JSON reader on the parser of nlohmann-json, and functions that write JSON text.
#include "core/io/detail/json.h"

#include <nlohmann/json.hpp>

namespace voxgrad {
namespace {

using nlohmann::json;

/// Implements nlohmann::json_sax. Functions return true to continue, and throw in case of an error.
class Reader {
 public:
  Reader(const InputFile& file, const char* what) : file_(file), what_(what) {}

  JsonValue take_document() { return std::move(document_.items.at(0).second); }

  bool null() { return take({"null"}); }
  bool boolean(bool) { return take({"a boolean"}); }
  bool number_integer(int64_t value) { return take({.type = "a negative number", .integer = value}); }
  bool number_unsigned(uint64_t value) {
    if (value > INT64_MAX) return take({"a number that does not fit in 64 bits"});
    return take({.type = "a number", .integer = static_cast<int64_t>(value)});
  }
  bool number_float(double, const std::string&) { return take({"a number that is not a 64-bit integer"}); }
  bool string(std::string& text) { return take({.type = "a string", .text = std::move(text)}); }
  bool binary(std::vector<uint8_t>&) { return false; }  // does not occur in JSON text
  bool start_object(size_t) { return open("an object"); }
  bool start_array(size_t) { return open("an array"); }
  bool key(std::string& key) {
    key_ = std::move(key);
    return true;
  }
  bool end_object() { return end_array(); }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&, const json::exception&) {
    file_.fail(what_, "is not valid JSON at byte ", position);
  }

 private:
  bool take(JsonValue value) {
    auto& items = open_.back()->items;
    file_.check(items.size() < 64 || open_.back()->type != "an array", what_, "has an array of more than 64 items");
    items.emplace_back(std::exchange(key_, {}), std::move(value));
    return true;
  }
  bool open(std::string_view type) {
    file_.check(open_.size() <= 64, what_, "has more than 64 levels of JSON");
    take({type});
    open_.push_back(&open_.back()->items.back().second);
    return true;
  }

  const InputFile& file_;
  const char* what_;
  JsonValue document_{"the document"};
  std::vector<JsonValue*> open_{&document_};  // the objects and arrays that contain the next value
  std::string key_;                           // the key of the next value
};

std::string joined(char open, const std::vector<std::string>& parts, char close) {
  std::string text{open};
  for (const std::string& part : parts) text += (text.size() > 1 ? "," : "") + part;
  return text += close;
}

}  // namespace

JsonValue read_json(const InputFile& file, const char* what, const std::string& text) {
  Reader reader(file, what);
  json::sax_parse(text, &reader);
  return reader.take_document();
}

std::string to_json(std::string_view text) { return json(text).dump(-1, ' ', false, json::error_handler_t::replace); }
std::string to_json(double value) { return json(value).dump(); }

std::string json_object(const std::vector<std::pair<std::string, std::string>>& members) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : members) parts.push_back(to_json(name) + ':' + value);
  return joined('{', parts, '}');
}

std::string json_array(const std::vector<std::string>& values) { return joined('[', values, ']'); }

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(json(text).dump());
  } catch (const json::exception&) {
    return false;
  }
  return true;
}

}  // namespace voxgrad
