// Implements the reader of nnU-Net's dataset folders.
#include "examples/nnunet/dataset_folder.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <system_error>

#include "examples/nnunet/dataset_json.h"

namespace nnunet {

using namespace voxgrad;

namespace {
namespace fs = std::filesystem;

constexpr const char* kOp = "DatasetFolder";

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
    check(known && !name.empty(), kOp, "'", (folder / (file + ending)).string(), "' must have a name like CASE_0000",
          ending, channels > 1 ? concat(" to CASE", channel_suffix(channels - 1), ending) : "",
          "; expected one file for each channel of dataset.json");
    cases.insert(name);
  }
  for (const std::string& name : cases)
    for (int64_t channel = 0; channel < channels; ++channel)
      check(files.contains(name + channel_suffix(channel)), kOp, "'",
            (folder / (name + channel_suffix(channel) + ending)).string(), "' is missing");
  return {cases.begin(), cases.end()};
}

/// Throws if dataset.json contains a key that changes nnU-Net's treatment of the dataset and is not supported.
void check_keys(const Json& dataset) {
  for (const char* key : {"regions_class_order", "dataset"})
    dataset.check(dataset.find(key).is_null(), "has the key \"", key, "\", which is not supported");
  const Json reader = dataset.find("overwrite_image_reader_writer");
  if (reader.is_null()) return;
  const std::string name = reader.text();
  reader.check_supported(name == "None" || name == "SimpleITKIO" || name == "NibabelIO", "SimpleITKIO, NibabelIO");
}

}  // namespace

DatasetFolder::DatasetFolder(const fs::path& path) : folder(path) {
  const Json dataset = Json::load(path / "dataset.json"), labels = dataset.at("labels");
  check_keys(dataset);
  channels = read_channels(dataset);
  for (const auto& [name, value] : labels.members())
    value.check(!value.is_array() || value.items().size() == 1, "is a list; regions are not supported");
  classes = read_labels(dataset).names;
  labels.check(classes.size() <= 256, "has ", classes.size(), " labels, expected at most 256");
  if (const Json background = labels.find("background"); !background.is_null())
    background.check(classes[0] == "background", "must be 0");
  if (const Json ignore = labels.find("ignore"); !ignore.is_null()) {
    ignore_index = std::ssize(classes);
    ignore.check(ignore.integer() == ignore_index, "must be the highest label, ", ignore_index);
  }
  file_ending = read_file_ending(dataset);
  training = list_cases(path / "imagesTr", file_ending, std::ssize(channels));
  test = list_cases(path / "imagesTs", file_ending, std::ssize(channels));
  const std::set<std::string> files = list(path / "labelsTr", file_ending);
  for (const std::string& name : training) check(files.contains(name), kOp, "'", label(name).string(), "' is missing");
  for (const std::string& name : files)
    check(std::binary_search(training.begin(), training.end(), name), kOp, "'",
          (path / "labelsTr" / (name + file_ending)).string(), "' has no image in imagesTr");
  const Json count = dataset.at("numTraining");
  count.check(count.integer() == std::ssize(training), "is ", count.integer(), ", but imagesTr has ", training.size(),
              training.size() == 1 ? " case" : " cases");
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
