// Implements the reader of nnU-Net's model folders.
#include "examples/nnunet/model_folder.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "examples/nnunet/architecture.h"
#include "examples/nnunet/dataset_json.h"
#include "examples/nnunet/json.h"

namespace nnunet {

using namespace voxgrad;

namespace {

/// nnU-Net's names of the values of Normalization, in the order of the enumeration.
constexpr std::array kSchemes{"ZScoreNormalization", "CTNormalization", "NoNormalization", "RescaleTo01Normalization",
                              "RGBTo01Normalization"};

Normalization read_scheme(const Json& name) {
  const auto found = std::ranges::find(kSchemes, name.text());
  std::string all;
  for (const char* scheme : kSchemes) all += (all.empty() ? "" : ", ") + std::string(scheme);
  name.check_supported(found != kSchemes.end(), all);
  return static_cast<Normalization>(found - kSchemes.begin());
}

std::vector<ChannelPlan> read_normalization(const Json& plans, const Json& configuration, size_t channels) {
  const Json schemes = configuration.at("normalization_schemes");
  const std::vector<Json> kinds = schemes.items();
  schemes.check(kinds.size() == channels, "must have one item per channel of dataset.json, ", channels,
                " in total, has ", kinds.size());
  const Json masks = configuration.find("use_mask_for_norm");
  const std::vector<Json> use_mask = masks.is_null() ? std::vector<Json>() : masks.items();
  masks.check(masks.is_null() || use_mask.size() == channels, "must have one item per channel of dataset.json, ",
              channels, " in total, has ", use_mask.size());
  std::vector<ChannelPlan> list;
  for (size_t i = 0; i < channels; ++i) {
    ChannelPlan channel{read_scheme(kinds[i]), !use_mask.empty() && use_mask[i].boolean(), {}};
    if (channel.kind == Normalization::ct) {
      constexpr const char* kName = "foreground_intensity_properties_per_channel";
      constexpr const char* kOldName = "foreground_intensity_properties_by_modality";
      const Json all = plans.find(kName).is_null() ? plans.at(kOldName) : plans.at(kName);
      const Json values = all.at(std::to_string(i));
      channel.intensities = {values.at("percentile_00_5").number(), values.at("percentile_99_5").number(),
                             values.at("mean").number(), values.at("std").number()};
    }
    list.push_back(channel);
  }
  return list;
}

/// Reads the arguments of the resampling function "resampling_fn_data" or "resampling_fn_probabilities".
ResampleOptions read_resampling(const Json& configuration, const std::string& key, int order) {
  ResampleOptions options{order, {}};
  const Json function = configuration.find(key), kwargs = configuration.find(key + "_kwargs");
  if (!function.is_null())
    function.check_supported(function.text() == "resample_data_or_seg_to_shape", "resample_data_or_seg_to_shape");
  if (kwargs.is_null()) return options;
  for (const auto& [name, value] : kwargs.members()) {
    if (name == "order") {
      options.order = static_cast<int>(value.integer());
      value.check_supported(value.integer() == 0 || value.integer() == 1 || value.integer() == 3, "0, 1, 3");
    } else if (name == "order_z") {
      value.check_supported(value.integer() == 0, "0");
    } else if (name == "is_seg") {
      value.check_supported(!value.boolean(), "false");
    } else if (name == "force_separate_z") {
      if (!value.is_null()) options.force_separate_z = value.boolean();
    } else {
      value.check_supported(value.is_null(), "null");
    }
  }
  return options;
}

Orientation read_orientation(const Json& plans) {
  const Json reader = plans.at("image_reader_writer");
  const std::string name = reader.text();
  reader.check_supported(name == "SimpleITKIO" || name == "NibabelIO" || name == "NibabelIOWithReorient",
                         "SimpleITKIO, NibabelIO, NibabelIOWithReorient");
  return name == "NibabelIOWithReorient" ? Orientation::closest_to_ras : Orientation::as_stored;
}

std::array<int64_t, 3> read_transpose(const Json& plans) {
  const Json value = plans.at("transpose_forward");
  const std::vector<double> axes = value.numbers(3);
  std::array<int64_t, 3> order;
  for (size_t i = 0; i < 3; ++i) {
    value.check(axes[i] == 0 || axes[i] == 1 || axes[i] == 2, "must hold the axes 0, 1 and 2");
    order[i] = static_cast<int64_t>(axes[i]);
  }
  value.check(std::set(order.begin(), order.end()).size() == 3, "must hold the axes 0, 1 and 2");
  return order;
}

/// Returns configuration `name` and its ancestors. A configuration inherits missing keys from the next configuration of
/// the list.
std::vector<Json> inheritance(const Json& plans, const std::string& name) {
  std::vector<Json> chain{plans.at("configurations").at(name)};
  for (;;) {
    const Json parent = chain.back().find("inherits_from");
    if (parent.is_null()) return chain;
    parent.check(chain.size() < 32, "forms a cycle");
    chain.push_back(plans.at("configurations").at(parent.text()));
  }
}

}  // namespace

ModelPlan read_plan(const std::filesystem::path& dataset_json, const std::filesystem::path& plans_json,
                    const std::string& name) {
  const Json dataset = Json::load(dataset_json), plans = Json::load(plans_json);
  const Json configuration = Json::merged(inheritance(plans, name));
  configuration.check(configuration.find("previous_stage").is_null(),
                      "is the second stage of a cascade, which is not supported");
  ModelPlan plan;
  plan.configuration = name;
  plan.channels = read_channels(dataset);
  plan.file_ending = read_file_ending(dataset);
  plan.labels = read_labels(dataset);
  plan.orientation = read_orientation(plans);
  plan.transpose_forward = read_transpose(plans);
  plan.is_2d = is_2d(configuration);
  const size_t axes = plan.is_2d ? 2 : 3;
  const std::vector<double> spacing = configuration.at("spacing").numbers(axes);
  const std::vector<double> patch = configuration.at("patch_size").numbers(axes);
  plan.patch_size = 1;
  for (size_t i = 0; i < axes; ++i) {
    const size_t axis = i + 3 - axes;
    configuration.at("spacing").check(spacing[i] > 0, "must be positive");
    configuration.at("patch_size")
        .check(patch[i] >= 1 && patch[i] <= 32767 && patch[i] == std::floor(patch[i]),
               "must hold integers from 1 to 32767");
    plan.spacing[axis] = spacing[i];
    plan.patch_size[static_cast<int>(axis)] = static_cast<int64_t>(patch[i]);
  }
  plan.normalization = read_normalization(plans, configuration, plan.channels.size());
  plan.resample_image = read_resampling(configuration, "resampling_fn_data", 3);
  plan.resample_logits = read_resampling(configuration, "resampling_fn_probabilities", 1);
  plan.network = read_architecture(configuration, std::ssize(plan.channels), std::ssize(plan.labels.names));
  return plan;
}

const char* scheme_name(Normalization kind) { return kSchemes[static_cast<size_t>(kind)]; }

Checkpoint::Checkpoint(const std::filesystem::path& path) : path_(path) {
  std::vector<int64_t> axes;
  if (path.extension() == ".safetensors") {
    Metadata metadata;
    weights_ = load_safetensors(path, Device::cpu(), &metadata);
    check(metadata.contains("configuration"), "nnU-Net", "'", path.string(), "' has no metadata \"configuration\"");
    configuration = metadata.at("configuration");
    for (const char axis : metadata["mirror_axes"]) axes.push_back(axis - '0');
  } else {
    const PtValue content = open_pt(path);
    configuration = content.at("init_args").at("configuration").text();
    if (const PtValue value = content.find("inference_allowed_mirroring_axes"); !value.is_none())
      for (const PtValue& axis : value.items()) axes.push_back(axis.integer());
    // torch.compile and DistributedDataParallel add prefixes to the names.
    for (const auto& [key, value] : content.at("network_weights").members()) {
      std::string name = key.text();
      for (const std::string_view prefix : {"module.", "_orig_mod."})
        if (name.starts_with(prefix)) name.erase(0, prefix.size());
      pt_weights_.emplace(name, value);
    }
  }
  for (const int64_t axis : axes) {
    check(axis >= 0 && axis < 3 && std::ranges::count(mirror_axes, axis) == 0, "nnU-Net", "'", path.string(),
          "' allows mirroring along axis ", axis, "; expected distinct axes from 0 to 2");
    mirror_axes.push_back(axis);
  }
}

Tensor Checkpoint::weight(const std::string& name) const {
  if (const auto found = weights_.find(name); found != weights_.end()) return found->second;
  const auto found = pt_weights_.find(name);
  return found == pt_weights_.end() ? Tensor() : found->second.tensor();
}

Network Checkpoint::network(const ModelPlan& plan) const {
  const nn::init::SkipInit skip;
  Network network = make_network(plan.network);
  network.module->eval();
  TensorMap state;
  std::vector<std::string> differences;
  for (const auto& [name, expected] : network.module->state_dict()) {
    Tensor tensor = weight(name);
    if (!tensor.defined()) {
      differences.push_back(name + " is missing");
      continue;
    }
    if (plan.is_2d && tensor.dim() == 4) tensor = tensor.unsqueeze(2);
    if (tensor.shape() == expected.shape())
      state[name] = tensor;
    else
      differences.push_back(concat(name, " has shape ", tensor.shape(), " instead of ", expected.shape()));
  }
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(differences.size(), kShown); ++i) text += (i > 0 ? ", " : "") + differences[i];
  check(differences.empty(), "nnU-Net", "'", path_.string(),
        "' does not fit the network that plans.json describes: ", text,
        differences.size() > kShown ? concat(" and ", differences.size() - kShown, " more") : std::string());
  network.module->load_state_dict(state);
  return network;
}

}  // namespace nnunet
