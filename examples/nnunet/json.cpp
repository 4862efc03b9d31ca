#include "examples/nnunet/json.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <set>

namespace nnunet {

Json Json::load(const std::filesystem::path& path) {
  constexpr uintmax_t kMaxSize = uintmax_t{1} << 26;
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  voxgrad::check(!error && stream, "nnU-Net", "cannot read '", path.string(), "'",
                 error ? ": " + error.message() : std::string());
  voxgrad::check(size <= kMaxSize, "nnU-Net", "'", path.string(), "' has ", size, " bytes, more than ", kMaxSize);
  auto file = std::make_shared<File>();
  file->path = path;
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  std::vector<std::set<std::string>> keys;  // keys of each object that contains the current position
  const auto check_keys = [&](int, Document::parse_event_t event, const Document& value) {
    using Event = Document::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    voxgrad::check(event != Event::key || keys.back().insert(value.get<std::string>()).second, "nnU-Net", "'",
                   path.string(), "': the key ", value.dump(), " occurs twice");
    return true;
  };
  try {
    file->document = Document::parse(text, check_keys);
  } catch (const nlohmann::json::parse_error& problem) {
    voxgrad::fail("nnU-Net", "'", path.string(), "' is not valid JSON at byte ", problem.byte);
  }
  return {file, &file->document, {}};
}

Json Json::merged(const std::vector<Json>& chain) {
  auto file = std::make_shared<File>(File{chain[0].file_->path, Document::object()});
  for (const Json& link : chain)
    for (const auto& [key, value] : link.members())
      if (!file->document.contains(key)) file->document[key] = *value.value_;
  return {file, &file->document, chain[0].where_};
}

void Json::check_supported(bool condition, const std::string& supported) const {
  constexpr size_t kMaxBytes = 200;  // a wrong file can contain a long value
  if (!condition) fail("is ", value_->dump().substr(0, kMaxBytes), "; supported: ", supported);
}

std::string Json::place() const {
  return voxgrad::concat("'", file_->path.string(), where_.empty() ? "' " : "': ", where_, where_.empty() ? "" : " ");
}

void Json::expect(bool good, const char* expected) const {
  check(good, "must be ", expected, ", is ", value_->is_structured() ? value_->type_name() : value_->dump());
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
