#include "nn/data/nnunet.h"

#include <dirent.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/input_file.h"

namespace voxgrad::data {
namespace {
namespace fs = std::filesystem;

constexpr const char* kOp = "NnUNetFolder";
constexpr int64_t kLargestText = 1 << 26;

/// A value of a JSON text.
struct Value {
  std::string_view type;                                 ///< JSON's name of the type
  std::string text{};                                    ///< the value of a string
  std::optional<int64_t> integer{};                      ///< the value of an integer
  std::vector<std::pair<std::string, Value>> members{};  ///< the members of an object
};

/// Collects the members of a JSON text's object, and their members; deeper values are left out. It replaces
/// nlohmann::json, whose destructor takes memory, and which converts itself to other types where it is printed.
class ValueReader {
 public:
  Value root;

  // The interface of nlohmann::json_sax; false ends the parsing.
  bool null() { return add({"null"}); }
  bool boolean(bool) { return add({"boolean"}); }
  bool number_integer(int64_t value) { return add({.type = "number", .integer = value}); }
  bool number_unsigned(uint64_t value) {
    return value <= INT64_MAX ? number_integer(std::bit_cast<int64_t>(value)) : add({"number"});
  }
  bool number_float(double, const std::string&) { return add({"number"}); }
  bool string(std::string& text) { return add({.type = "string", .text = std::move(text)}); }
  bool binary(std::vector<uint8_t>&) { return false; }
  bool key(std::string& name) {
    key_ = std::move(name);
    return true;
  }
  bool start_object(size_t) { return open("object"); }
  bool start_array(size_t) { return open("array"); }
  bool end_object() { return --depth_ >= 0; }
  bool end_array() { return --depth_ >= 0; }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) { return false; }

 private:
  bool open(const char* type) {
    add({type});
    ++depth_;
    return true;
  }
  bool add(Value value) {
    if (depth_ == 0) {
      root = std::move(value);
      return true;
    }
    Value* parent = depth_ == 1 ? &root : depth_ == 2 && !root.members.empty() ? &root.members.back().second : nullptr;
    if (parent && parent->type == "object") parent->members.emplace_back(std::move(key_), std::move(value));
    return true;
  }

  int64_t depth_ = 0;
  std::string key_;
};

Value read_json(InputFile& file) {
  file.check(file.size() <= kLargestText, "larger than ", kLargestText, " bytes");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), text.size());
  ValueReader reader;
  const bool whole = nlohmann::json::sax_parse(text, &reader);
  file.check(whole && reader.root.type == "object", "is not a JSON object");
  return std::move(reader.root);
}

const Value& at(const InputFile& file, const Value& object, const char* key, std::string_view type) {
  const auto is_named = [&](auto& member) { return member.first == key; };
  const auto end = object.members.end(), found = std::find_if(object.members.begin(), end, is_named);
  file.check(found != end, "has no ", in_quotes(key));
  file.check(std::find_if(found + 1, end, is_named) == end, "has two ", in_quotes(key));
  const Value& value = found->second;
  file.check(value.type == type, in_quotes(key), " must be ", type, ", is ", value.type);
  return value;
}

/// Returns nothing if `text` is not an integer.
std::optional<int64_t> parse_integer(const std::string& text) {
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && stop == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

/// Names by their numbers 0, 1, 2, ... from {"0": "T1"} or {"background": 0}.
std::vector<std::string> read_names(const InputFile& file, const Value& object, const char* key, size_t least,
                                    size_t most) {
  std::map<int64_t, std::string> names;
  std::set<std::string> keys;
  for (const auto& [left, right] : at(file, object, key, "object").members) {
    file.check(keys.insert(left).second, in_quotes(key), ": ", in_quotes(left), " is there twice");
    file.check(right.type != "array", in_quotes(key), ": ", in_quotes(left), " is a list; regions are not supported");
    const std::optional<int64_t> number = right.type == "string" ? parse_integer(left) : right.integer;
    file.check(number.has_value(), in_quotes(key), ": ", in_quotes(left), " has no number");
    const bool fresh = names.emplace(*number, right.type == "string" ? right.text : left).second;
    file.check(fresh, in_quotes(key), ": two are number ", *number);
  }
  file.check(names.size() >= least && names.size() <= most, in_quotes(key), " has ", names.size(), " names, expected ",
             least, " to ", most);
  std::vector<std::string> list;
  for (const auto& [number, name] : names) {
    file.check(number == std::ssize(list), in_quotes(key), " must be numbered 0, 1, 2, ...; ", list.size(),
               " is missing");
    list.push_back(name);
  }
  return list;
}

/// Names of the files in a folder, without their ending; none if the folder is missing. Hidden ones are passed over.
std::set<std::string> list(const fs::path& folder, const std::string& ending) {
  std::set<std::string> names;
  // Not a directory_iterator: it calls std::terminate if memory runs out in it.
  const auto close = [](DIR* directory) { closedir(directory); };
  const std::unique_ptr<DIR, decltype(close)> directory(opendir(folder.c_str()), close);
  check(directory || errno == ENOENT, kOp, "cannot read '", folder.string(),
        "': ", std::generic_category().message(errno));
  while (const dirent* entry = directory ? readdir(directory.get()) : nullptr) {
    const std::string name = entry->d_name;
    if (name.starts_with('.')) continue;
    check(name.ends_with(ending), kOp, "'", (folder / name).string(), "' does not end with ", ending,
          ", the file_ending of dataset.json");
    names.insert(name.substr(0, name.size() - ending.size()));
  }
  return names;
}

std::string channel_suffix(int64_t channel) {
  const std::string digits = std::to_string(channel);
  return "_" + std::string(4 - std::min<size_t>(digits.size(), 4), '0') + digits;
}

/// The cases of imagesTr or imagesTs, each of whose channels has its file.
std::vector<std::string> list_cases(const fs::path& folder, const std::string& ending, int64_t channels) {
  const std::set<std::string> files = list(folder, ending);
  std::set<std::string> cases;
  for (const std::string& file : files) {
    const std::string name = file.substr(0, file.size() - std::min<size_t>(file.size(), 5));
    bool known = false;
    for (int64_t channel = 0; channel < channels; ++channel) known |= file == name + channel_suffix(channel);
    check(known && !name.empty(), kOp, "'", (folder / (file + ending)).string(), "' is not named CASE_0000", ending,
          channels > 1 ? concat(" to CASE", channel_suffix(channels - 1), ending) : "",
          ", one for each of the channels of dataset.json");
    cases.insert(name);
  }
  for (const std::string& name : cases)
    for (int64_t channel = 0; channel < channels; ++channel)
      check(files.contains(name + channel_suffix(channel)), kOp, "'",
            (folder / (name + channel_suffix(channel) + ending)).string(), "' is missing");
  return {cases.begin(), cases.end()};
}

}  // namespace

NnUNetFolder::NnUNetFolder(const fs::path& path) : folder(path) {
  InputFile file(path / "dataset.json", kOp);
  const Value object = read_json(file);
  channels = read_names(file, object, "channel_names", 1, 9999);
  classes = read_names(file, object, "labels", 2, 256);
  file_ending = at(file, object, "file_ending", "string").text;
  file.check(file_ending == ".nii.gz" || file_ending == ".nii", "file_ending ", in_quotes(file_ending),
             " is not supported (.nii.gz and .nii are)");
  const std::optional<int64_t> count = at(file, object, "numTraining", "number").integer;
  file.check(count.has_value(), "numTraining must be an integer of at most 64 bits");
  training = list_cases(path / "imagesTr", file_ending, std::ssize(channels));
  test = list_cases(path / "imagesTs", file_ending, std::ssize(channels));
  const std::set<std::string> labels = list(path / "labelsTr", file_ending);
  for (const std::string& name : training) check(labels.contains(name), kOp, "'", label(name).string(), "' is missing");
  for (const std::string& name : labels)
    check(std::binary_search(training.begin(), training.end(), name), kOp, "'",
          (path / "labelsTr" / (name + file_ending)).string(), "' has no image in imagesTr");
  file.check(count == std::ssize(training), "numTraining is ", *count, ", imagesTr has ", training.size(), " cases");
}

std::vector<fs::path> NnUNetFolder::images(const std::string& name) const {
  const bool known = std::binary_search(training.begin(), training.end(), name);
  check(known || std::binary_search(test.begin(), test.end(), name), kOp, "'", folder.string(), "' has no case '", name,
        "'");
  std::vector<fs::path> paths;
  for (int64_t channel = 0; channel < std::ssize(channels); ++channel)
    paths.push_back(folder / (known ? "imagesTr" : "imagesTs") / (name + channel_suffix(channel) + file_ending));
  return paths;
}

fs::path NnUNetFolder::label(const std::string& name) const {
  if (!std::binary_search(training.begin(), training.end(), name)) return {};
  return folder / "labelsTr" / (name + file_ending);
}

Case NnUNetFolder::load(const std::string& name) const {
  return load_case(name, images(name), label(name), std::ssize(classes));
}

}  // namespace voxgrad::data
