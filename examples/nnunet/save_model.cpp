// Writes model folders in the format of nnU-Net v2.
#include <nlohmann/json.hpp>

#include "core/io/atomic_file.h"
#include "examples/common/output.h"
#include "examples/nnunet/model_folder.h"

namespace nnunet {

using namespace voxgrad;

namespace {

using Json = nlohmann::ordered_json;

/// Returns a list with the value of `member` of each stage. A Triple becomes a list of three numbers.
template <class T>
Json per_stage(const std::vector<nn::UNetStage>& stages, T nn::UNetStage::*member) {
  Json list = Json::array();
  for (const nn::UNetStage& stage : stages) {
    if constexpr (std::is_same_v<T, Triple>)
      list.push_back((stage.*member).values);
    else
      list.push_back(stage.*member);
  }
  return list;
}

Json architecture(const MedNeXtOptions& network) {
  return {{"network_class_name", "voxgrad.MedNeXt"},
          {"arch_kwargs",
           {{"channels", network.channels},
            {"kernel_size", network.kernel_size},
            {"blocks", network.blocks},
            {"expansion", network.expansion}}}};
}

Json architecture(const nn::UNetOptions& network) {
  const std::vector<nn::UNetStage>& stages = network.stages;
  // The file lists the stages of the decoder from the lowest to the highest resolution.
  std::vector<int64_t> decoder;
  for (size_t i = stages.size() - 1; i-- > 0;) decoder.push_back(stages[i].decoder_convs);
  const char* const name = network.residual ? "ResidualEncoderUNet" : "PlainConvUNet";
  return {{"network_class_name", std::string("dynamic_network_architectures.architectures.unet.") + name},
          {"arch_kwargs",
           {{"n_stages", stages.size()},
            {"features_per_stage", per_stage(stages, &nn::UNetStage::features)},
            {"conv_op", "torch.nn.modules.conv.Conv3d"},
            {"kernel_sizes", per_stage(stages, &nn::UNetStage::kernel_size)},
            {"strides", per_stage(stages, &nn::UNetStage::stride)},
            {network.residual ? "n_blocks_per_stage" : "n_conv_per_stage", per_stage(stages, &nn::UNetStage::convs)},
            {"n_conv_per_stage_decoder", decoder},
            {"conv_bias", network.bias},
            {"norm_op", "torch.nn.modules.instancenorm.InstanceNorm3d"},
            {"norm_op_kwargs", {{"eps", network.norm->eps}, {"affine", network.norm->affine}}},
            {"dropout_op", nullptr},
            {"dropout_op_kwargs", nullptr},
            {"nonlin", "torch.nn.LeakyReLU"},
            {"nonlin_kwargs", {{"inplace", true}, {"negative_slope", network.activation.negative_slope}}}}},
          {"_kw_requires_import", {"conv_op", "norm_op", "dropout_op", "nonlin"}}};
}

Json resampling(const ResampleOptions& options, bool labels) {
  const Json separate = options.force_separate_z ? Json(*options.force_separate_z) : Json(nullptr);
  return {{"is_seg", labels}, {"order", options.order}, {"order_z", 0}, {"force_separate_z", separate}};
}

Json configuration(const ModelPlan& plan) {
  Json schemes = Json::array(), masks = Json::array();
  for (const ChannelPlan& channel : plan.normalization) {
    schemes.push_back(scheme_name(channel.kind));
    masks.push_back(channel.use_mask);
  }
  constexpr const char* kFunction = "resample_data_or_seg_to_shape";
  return {{"data_identifier", "nnUNetPlans_" + plan.configuration},
          {"preprocessor_name", "DefaultPreprocessor"},
          {"batch_size", 2},
          {"patch_size", plan.patch_size.values},
          {"median_image_size_in_voxels", plan.patch_size.values},
          {"spacing", plan.spacing},
          {"normalization_schemes", schemes},
          {"use_mask_for_norm", masks},
          {"resampling_fn_data", kFunction},
          {"resampling_fn_seg", kFunction},
          {"resampling_fn_data_kwargs", resampling(plan.resample_image, false)},
          {"resampling_fn_seg_kwargs", resampling({1, plan.resample_image.force_separate_z}, true)},
          {"resampling_fn_probabilities", kFunction},
          {"resampling_fn_probabilities_kwargs", resampling(plan.resample_logits, false)},
          {"batch_dice", true},
          {"architecture", std::visit([](const auto& network) { return architecture(network); }, plan.network)}};
}

Json plans(const ModelPlan& plan) {
  Json intensities = Json::object();
  for (size_t i = 0; i < plan.normalization.size(); ++i) {
    const Intensities& channel = plan.normalization[i].intensities;
    intensities[std::to_string(i)] = {{"percentile_00_5", channel.low},
                                      {"percentile_99_5", channel.high},
                                      {"mean", channel.mean},
                                      {"std", channel.std}};
  }
  Json backward = {0, 0, 0};
  for (size_t i = 0; i < 3; ++i) backward[static_cast<size_t>(plan.transpose_forward[i])] = i;
  return {{"dataset_name", "Dataset000_voxgrad"},
          {"plans_name", "nnUNetPlans"},
          {"original_median_spacing_after_transp", plan.spacing},
          {"original_median_shape_after_transp", plan.patch_size.values},
          {"image_reader_writer",
           plan.orientation == Orientation::closest_to_ras ? "NibabelIOWithReorient" : "SimpleITKIO"},
          {"transpose_forward", plan.transpose_forward},
          {"transpose_backward", backward},
          {"configurations", {{plan.configuration, configuration(plan)}}},
          {"experiment_planner_used", "ExperimentPlanner"},
          {"label_manager", "LabelManager"},
          {"foreground_intensity_properties_per_channel", intensities}};
}

Json dataset(const ModelPlan& plan, int64_t training_cases) {
  Json channels = Json::object(), labels = Json::object();
  for (size_t i = 0; i < plan.channels.size(); ++i) channels[std::to_string(i)] = plan.channels[i];
  for (size_t i = 0; i < plan.labels.names.size(); ++i) labels[plan.labels.names[i]] = plan.labels.values[i];
  return {{"channel_names", channels},
          {"labels", labels},
          {"numTraining", training_cases},
          {"file_ending", plan.file_ending}};
}

}  // namespace

void check_savable(const ModelPlan& plan) {
  check(!plan.is_2d && !plan.labels.regions, "save_model", "expected a 3-D network and labels without regions");
  const auto* unet = std::get_if<nn::UNetOptions>(&plan.network);
  check(!unet || (unet->norm && !unet->norm->batch && unet->activation.kind == ActivationKind::leaky_relu),
        "save_model", "expected a network with InstanceNorm and LeakyReLU");
}

void save_model(const std::filesystem::path& folder, const ModelPlan& plan, const Network& network,
                const Axes& mirror_axes, int64_t training_cases) {
  check_savable(plan);
  examples::create_folder(folder / "fold_0");
  write_file(folder / "dataset.json", dataset(plan, training_cases).dump(2) + '\n', "save_model");
  write_file(folder / "plans.json", plans(plan).dump(2) + '\n', "save_model");
  std::string axes;
  for (const int64_t axis : mirror_axes) axes += std::to_string(axis);
  save_safetensors(folder / "fold_0/checkpoint_final.safetensors", network.module->state_dict(),
                   {{"configuration", plan.configuration}, {"mirror_axes", axes}});
}

}  // namespace nnunet
