#include "examples/nnunet/dataset_folder.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/io/detail/input_file.h"
#include "core/io/detail/json.h"

namespace nnunet {

using namespace voxgrad;

namespace {
namespace fs = std::filesystem;

constexpr const char* kOp = "DatasetFolder";
constexpr int64_t kMaxTextSize = 1 << 24;

/// Values of dataset.json by their path. Holds the top-level values, the members of top-level objects (path: two keys),
/// and the first two items of an array that is such a member (path: two keys and ""). Deeper values are left out.
using Values = std::multimap<JsonPath, JsonValue>;

Values read_values(InputFile& file) {
  file.check(file.size() <= kMaxTextSize, "larger than ", kMaxTextSize, " bytes");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), text.size());
  Values values;
  read_json(file, "", text, [&](const JsonPath& path, const JsonValue& value) {
    file.check(!path.empty() || value.type == "an object", "is not a JSON object");
    const bool is_item = path.size() == 3;
    if (path.size() > 3 || (path.size() > 1 && values.find({path[0]})->second.type != "an object")) return;
    if (is_item && values.find({path[0], path[1]})->second.type != "an array") return;
    const size_t known = values.count(path);
    file.check(known == 0 || is_item, in_quotes(path.empty() ? "" : path.back()), " occurs twice");
    if (known < 2) values.emplace(path, value);
  });
  return values;
}

/// Returns the value of a top-level key. Throws if the key is missing or has another type.
const JsonValue& at(const InputFile& file, const Values& values, const char* key, std::string_view type) {
  const auto found = values.find({key});
  file.check(found != values.end(), "has no ", in_quotes(key));
  const JsonValue& value = found->second;
  file.check(value.type == type || (type == "a number" && value.integer), in_quotes(key), " must be ", type, ", is ",
             value.type);
  return value;
}

/// Converts `text` to an integer. Returns nothing if `text` is not an integer.
std::optional<int64_t> parse_integer(const std::string& text) {
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && stop == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

/// Returns the names in the order of their numbers, which must be 0, 1, 2, ... The object maps numbers to names, as in
/// {"0": "T1"}, or names to numbers, as in {"background": 0}. An array with a single number stands for that number.
std::vector<std::string> read_names(const InputFile& file, const Values& values, const char* key, size_t min_count,
                                    size_t max_count) {
  at(file, values, key, "an object");
  std::map<int64_t, std::string> names;
  for (auto entry = values.upper_bound({key}); entry != values.end() && entry->first[0] == key; ++entry) {
    if (entry->first.size() != 2) continue;
    const std::string& left = entry->first[1];
    const bool is_list = entry->second.type == "an array";
    file.check(!is_list || values.count({key, left, ""}) == 1, in_quotes(key), ": ", in_quotes(left),
               " is a list; regions are not supported");
    const JsonValue& right = is_list ? values.find({key, left, ""})->second : entry->second;
    const bool is_name = right.type == "a string";
    const std::optional<int64_t> number = is_name ? parse_integer(left) : right.integer;
    file.check(number.has_value(), in_quotes(key), ": ", in_quotes(left), " has no integer number");
    file.check(names.emplace(*number, is_name ? right.text : left).second, in_quotes(key), ": number ", *number,
               " occurs twice");
  }
  file.check(names.size() >= min_count && names.size() <= max_count, in_quotes(key), " has ", names.size(),
             " names, expected ", min_count, " to ", max_count);
  std::vector<std::string> list;
  for (const auto& [number, name] : names) {
    file.check(number == std::ssize(list), in_quotes(key), " must be numbered 0, 1, 2, ...; ", list.size(),
               " is missing");
    list.push_back(name);
  }
  return list;
}

/// Returns the names of the files in a folder, without their ending. Skips hidden files. Returns an empty set if the
/// folder does not exist.
std::set<std::string> list(const fs::path& folder, const std::string& ending) {
  std::set<std::string> names;
  // std::filesystem::directory_iterator would call std::terminate if an allocation fails inside it.
  const auto close = [](DIR* directory) { closedir(directory); };
  const std::unique_ptr<DIR, decltype(close)> directory(opendir(folder.c_str()), close);
  int error = errno;
  for (;;) {
    errno = 0;
    const dirent* entry = directory ? readdir(directory.get()) : nullptr;
    if (directory) error = errno;
    if (!entry) break;
    const std::string name = entry->d_name;
    if (name.starts_with('.')) continue;
    check(name.ends_with(ending), kOp, "'", (folder / name).string(), "' does not end with ", ending,
          ", the file_ending of dataset.json");
    names.insert(name.substr(0, name.size() - ending.size()));
  }
  check(error == (directory ? 0 : ENOENT), kOp, "cannot read '", folder.string(),
        "': ", std::generic_category().message(error));
  return names;
}

std::string channel_suffix(int64_t channel) {
  const std::string digits = std::to_string(channel);
  return "_" + std::string(4 - std::min<size_t>(digits.size(), 4), '0') + digits;
}

/// Returns the cases of imagesTr or imagesTs. Throws if the file of a channel is missing or a file name is unexpected.
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

/// Throws if dataset.json contains a key that changes nnU-Net's treatment of the dataset and is not supported.
void check_supported(const InputFile& file, const Values& values) {
  file.check(!values.contains({"regions_class_order"}),
             "'regions_class_order' requires regions, which are not supported");
  file.check(!values.contains({"dataset"}),
             "'dataset', a list of cases, is not supported; put the cases into imagesTr and labelsTr");
  const auto reader = values.find({"overwrite_image_reader_writer"});
  if (reader == values.end() || reader->second.type == "null") return;
  const std::string& name = reader->second.text;
  file.check(name == "None" || name == "SimpleITKIO" || name == "NibabelIO", "overwrite_image_reader_writer ",
             in_quotes(name), " is not supported (SimpleITKIO and NibabelIO are)");
}

}  // namespace

DatasetFolder::DatasetFolder(const fs::path& path) : folder(path) {
  InputFile file(path / "dataset.json", kOp);
  const Values values = read_values(file);
  check_supported(file, values);
  const bool older = values.contains({"modality"}) && !values.contains({"channel_names"});
  channels = read_names(file, values, older ? "modality" : "channel_names", 1, 9999);
  classes = read_names(file, values, "labels", 2, 256);
  for (size_t i = 0; i < classes.size(); ++i) {
    file.check(classes[i] != "background" || i == 0, "'labels': 'background' must be 0, is ", i);
    file.check(classes[i] != "ignore" || i + 1 == classes.size(), "'labels': 'ignore' must be the highest label, ",
               classes.size() - 1, ", is ", i);
  }
  if (classes.back() == "ignore") {
    classes.pop_back();
    ignore_index = std::ssize(classes);
    file.check(classes.size() > 1, "'labels' has only ", in_quotes(classes[0]), " and 'ignore'");
  }
  file_ending = at(file, values, "file_ending", "a string").text;
  file.check(file_ending == ".nii.gz" || file_ending == ".nii", "file_ending ", in_quotes(file_ending),
             " is not supported (.nii.gz and .nii are)");
  const std::optional<int64_t> count = at(file, values, "numTraining", "a number").integer;
  training = list_cases(path / "imagesTr", file_ending, std::ssize(channels));
  test = list_cases(path / "imagesTs", file_ending, std::ssize(channels));
  const std::set<std::string> labels = list(path / "labelsTr", file_ending);
  for (const std::string& name : training) check(labels.contains(name), kOp, "'", label(name).string(), "' is missing");
  for (const std::string& name : labels)
    check(std::binary_search(training.begin(), training.end(), name), kOp, "'",
          (path / "labelsTr" / (name + file_ending)).string(), "' has no image in imagesTr");
  file.check(count == std::ssize(training), "numTraining is ", *count, ", imagesTr has ", training.size(), " cases");
}

std::vector<fs::path> DatasetFolder::images(const std::string& name) const {
  const bool known = std::binary_search(training.begin(), training.end(), name);
  check(known || std::binary_search(test.begin(), test.end(), name), kOp, "'", folder.string(), "' has no case '", name,
        "'");
  std::vector<fs::path> paths;
  for (int64_t channel = 0; channel < std::ssize(channels); ++channel)
    paths.push_back(folder / (known ? "imagesTr" : "imagesTs") / (name + channel_suffix(channel) + file_ending));
  return paths;
}

fs::path DatasetFolder::label(const std::string& name) const {
  if (!std::binary_search(training.begin(), training.end(), name)) return {};
  return folder / "labelsTr" / (name + file_ending);
}

Case DatasetFolder::load(const std::string& name) const {
  return load_case(name, images(name), label(name), std::ssize(classes), ignore_index);
}

}  // namespace nnunet
