#include "nn/data/nnunet.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/input_file.h"

namespace voxgrad::data {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOp = "NnUNetFolder";
constexpr int64_t kLargestText = 1 << 26;

json read_json(InputFile& file) {
  file.check(file.size() <= kLargestText, "larger than ", kLargestText, " bytes");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), text.size());
  json parsed = json::parse(text, nullptr, false);
  file.check(parsed.is_object(), "is not a JSON object");
  return parsed;
}

const json& at(const InputFile& file, const json& object, const char* key, json::value_t type) {
  const auto found = object.find(key);
  file.check(found != object.end(), "has no ", in_quotes(key));
  const bool number = type == json::value_t::number_unsigned && found->is_number_integer();
  file.check(found->type() == type || number, in_quotes(key), " must be ", json(type).type_name(), ", is ",
             found->type_name());
  return *found;
}

/// Names by their numbers 0, 1, 2, ... from {"0": "T1"} or {"background": 0}. A list of one number is that number.
std::vector<std::string> read_names(const InputFile& file, const json& object, const char* key, size_t least,
                                    size_t most) {
  std::map<int64_t, std::string> names;
  for (const auto& [left, right] : at(file, object, key, json::value_t::object).items()) {
    const bool is_list = right.is_array();
    file.check(!is_list || right.size() == 1, in_quotes(key), ": ", in_quotes(left), " is a list of ", right.size(),
               "; regions are not supported");
    const json number = right.is_string() ? json::parse(left, nullptr, false) : is_list ? right[0] : right;
    file.check(number.is_number_integer(), in_quotes(key), ": ", in_quotes(left), " has no number");
    const bool fresh = names.emplace(number.get<int64_t>(), right.is_string() ? right.get<std::string>() : left).second;
    file.check(fresh, in_quotes(key), ": two are number ", number);
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
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.')) continue;
    check(name.ends_with(ending), kOp, "'", entry.path().string(), "' does not end with ", ending,
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

/// Refuses keys that change what nnU-Net does with a data set and are not supported.
void check_supported(const InputFile& file, const json& object) {
  file.check(!object.contains("regions_class_order"),
             "'regions_class_order' belongs to labels that are regions, which are not supported");
  file.check(!object.contains("dataset"),
             "'dataset', a list of cases, is not supported; put the cases into imagesTr and labelsTr");
  const auto reader = object.find("overwrite_image_reader_writer");
  const bool supported = reader == object.end() || reader->is_null() || *reader == "None" || *reader == "SimpleITKIO" ||
                         *reader == "NibabelIO";
  file.check(supported, "overwrite_image_reader_writer ", supported ? "" : reader->dump(),
             " is not supported (SimpleITKIO and NibabelIO are)");
}

}  // namespace

NnUNetFolder::NnUNetFolder(const fs::path& path) : folder(path) {
  InputFile file(path / "dataset.json", kOp);
  const json object = read_json(file);
  check_supported(file, object);
  const bool older = object.contains("modality") && !object.contains("channel_names");
  channels = read_names(file, object, older ? "modality" : "channel_names", 1, 9999);
  classes = read_names(file, object, "labels", 2, 256);
  for (size_t i = 0; i < classes.size(); ++i) {
    file.check(classes[i] != "background" || i == 0, "'labels': 'background' must be 0, is ", i);
    file.check(classes[i] != "ignore" || i + 1 == classes.size(), "'labels': 'ignore' must be the highest label, is ",
               i, " of 0 .. ", classes.size() - 1);
  }
  if (classes.back() == "ignore") {
    classes.pop_back();
    ignore_index = std::ssize(classes);
    file.check(classes.size() > 1, "'labels' has only ", in_quotes(classes[0]), " and 'ignore'");
  }
  file_ending = at(file, object, "file_ending", json::value_t::string);
  file.check(file_ending == ".nii.gz" || file_ending == ".nii", "file_ending ", in_quotes(file_ending),
             " is not supported (.nii.gz and .nii are)");
  const auto count = at(file, object, "numTraining", json::value_t::number_unsigned).get<int64_t>();
  training = list_cases(path / "imagesTr", file_ending, std::ssize(channels));
  test = list_cases(path / "imagesTs", file_ending, std::ssize(channels));
  const std::set<std::string> labels = list(path / "labelsTr", file_ending);
  for (const std::string& name : training) check(labels.contains(name), kOp, "'", label(name).string(), "' is missing");
  for (const std::string& name : labels)
    check(std::binary_search(training.begin(), training.end(), name), kOp, "'",
          (path / "labelsTr" / (name + file_ending)).string(), "' has no image in imagesTr");
  file.check(count == std::ssize(training), "numTraining is ", count, ", imagesTr has ", training.size(), " cases");
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
  return load_case(name, images(name), label(name), std::ssize(classes), ignore_index);
}

}  // namespace voxgrad::data
