// Implements the reader of nnU-Net's file dataset.json.
#include "examples/nnunet/dataset_json.h"

#include <set>
#include <utility>

namespace nnunet {

namespace {

int64_t read_label(const Json& value) {
  const int64_t label = value.integer();
  value.check(label >= 0 && label <= 65535, "must be 0 to 65535, is ", label);
  return label;
}

/// Returns the labels of an entry: an integer, or a list of integers.
std::vector<int64_t> read_entry(const Json& value) {
  if (!value.is_array()) return {read_label(value)};
  std::vector<int64_t> labels;
  for (const Json& item : value.items()) labels.push_back(read_label(item));
  value.check(!labels.empty(), "is empty");
  return labels;
}

bool is_background(const std::string& name, const std::vector<int64_t>& entry) {
  return name == "background" || (entry.size() == 1 && entry[0] == 0);
}

}  // namespace

std::vector<std::string> read_channels(const Json& dataset) {
  const Json names = dataset.find("channel_names").is_null() ? dataset.at("modality") : dataset.at("channel_names");
  const size_t count = names.members().size();
  names.check(count > 0 && count < 10000, "has ", count, " channels, expected 1 to 9999");
  std::vector<std::string> channels;
  for (size_t i = 0; i < count; ++i) channels.push_back(names.at(std::to_string(i)).text());
  return channels;
}

Labels read_labels(const Json& dataset) {
  Labels labels;
  std::set<int64_t> numbers;
  std::vector<std::pair<std::string, std::vector<int64_t>>> entries;
  for (const auto& [name, value] : dataset.at("labels").members()) {
    if (name == "ignore") continue;
    const std::vector<int64_t> entry = read_entry(value);
    numbers.insert(entry.begin(), entry.end());
    labels.regions |= entry.size() > 1;
    entries.emplace_back(name, entry);
  }
  if (!labels.regions) {
    labels.names.resize(numbers.size());
    for (const auto& [name, entry] : entries) {
      const Json value = dataset.at("labels").at(name);
      value.check(entry[0] < std::ssize(labels.names), "is ", entry[0], ", but there ",
                  labels.names.size() == 1 ? "is" : "are", " only ", labels.names.size(),
                  labels.names.size() == 1 ? " label" : " labels", "; labels must be numbered 0, 1, 2, ...");
      std::string& found = labels.names[static_cast<size_t>(entry[0])];
      value.check(found.empty(), "is ", entry[0], ", which is also the number of \"", found, '"');
      found = name;
    }
    for (size_t i = 0; i < labels.names.size(); ++i) {
      labels.values.push_back(static_cast<int64_t>(i));
      labels.parts.push_back({static_cast<int64_t>(i)});
    }
    dataset.at("labels").check(labels.names.size() >= 2, "must have at least 2 labels besides \"ignore\"");
    return labels;
  }
  for (const auto& [name, entry] : entries) {
    if (is_background(name, entry)) continue;
    labels.names.push_back(name);
    labels.parts.push_back(entry);
  }
  const Json order = dataset.at("regions_class_order");
  for (const Json& item : order.items()) labels.values.push_back(read_label(item));
  order.check(labels.values.size() == labels.names.size(), "must have one entry per region, ", labels.names.size(),
              " in total, has ", labels.values.size());
  return labels;
}

std::string read_file_ending(const Json& dataset) {
  const Json value = dataset.at("file_ending");
  value.check_supported(value.text() == ".nii.gz" || value.text() == ".nii", ".nii.gz, .nii");
  return value.text();
}

}  // namespace nnunet
