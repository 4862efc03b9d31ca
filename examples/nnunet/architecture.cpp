// Reads the description of a network from nnU-Net's plans.
#include "examples/nnunet/architecture.h"

#include <set>
#include <vector>

namespace nnunet {

using namespace voxgrad;
using nn::UNetOptions;

namespace {

/// Returns the part of a Python name after the last dot: "Conv3d" for "torch.nn.modules.conv.Conv3d".
std::string short_name(const Json& name) {
  const std::string text = name.text();
  return text.substr(text.rfind('.') + 1);
}

/// Throws if `object` has a key that is not in `known` and whose value is not null.
void check_known(const Json& object, const std::set<std::string>& known) {
  for (const auto& [key, value] : object.members())
    object.check(known.contains(key) || value.is_null(), "has the unknown key \"", key, '"');
}

/// Returns one value per stage. `value` is either a list or one integer for all stages.
std::vector<int64_t> per_stage(const Json& value, size_t stages) {
  if (value.is_integer()) return std::vector<int64_t>(stages, value.integer());
  std::vector<int64_t> list;
  for (const Json& item : value.items()) list.push_back(item.integer());
  value.check(list.size() == stages, "must have ", stages, " items, has ", list.size());
  return list;
}

/// Returns sizes along D, H and W. `value` is either a list or one integer for all axes. If `axes` is 2, the size along
/// D is 1.
Triple triple(const Json& value, int64_t axes) {
  Triple result = 1;
  const int64_t first = 3 - axes;
  if (value.is_integer()) {
    for (int64_t axis = first; axis < 3; ++axis) result[static_cast<int>(axis)] = value.integer();
    return result;
  }
  const std::vector<Json> items = value.items();
  value.check(std::ssize(items) == axes, "must have ", axes, " items, has ", items.size());
  for (int64_t axis = first; axis < 3; ++axis)
    result[static_cast<int>(axis)] = items[static_cast<size_t>(axis - first)].integer();
  return result;
}

/// Returns the sizes of each stage. `value` is either a list with one item per stage, each as in triple(), or one
/// integer for all stages.
std::vector<Triple> triples(const Json& value, size_t stages, int64_t axes) {
  if (value.is_integer()) return std::vector<Triple>(stages, triple(value, axes));
  std::vector<Triple> list;
  for (const Json& item : value.items()) list.push_back(triple(item, axes));
  value.check(list.size() == stages, "must have ", stages, " items, has ", list.size());
  return list;
}

/// Returns the members of a JSON object of keyword arguments. Returns an empty list if the value is null.
std::vector<std::pair<std::string, Json>> arguments(const Json& value) {
  if (value.is_null()) return {};
  return value.members();
}

std::optional<nn::UNetNorm> read_norm(const Json& name, const Json& kwargs, int64_t axes) {
  if (name.is_null()) return {};
  nn::UNetNorm norm;
  const std::string op = short_name(name);
  norm.batch = op == concat("BatchNorm", axes, 'd');
  name.check_supported(norm.batch || op == concat("InstanceNorm", axes, 'd'),
                       concat("InstanceNorm", axes, "d, BatchNorm", axes, 'd'));
  norm.affine = norm.batch;  // PyTorch's default: true for BatchNorm, false for InstanceNorm
  for (const auto& [key, value] : arguments(kwargs)) {
    if (key == "eps")
      norm.eps = value.number();
    else if (key == "affine")
      norm.affine = value.boolean();
    else if (key == "track_running_stats")
      value.check_supported(value.boolean() == norm.batch, norm.batch ? "true" : "false");
    else
      kwargs.check(key == "momentum", "has the unknown key \"", key, '"');
  }
  return norm;
}

ActivationArguments read_activation(const Json& name, const Json& kwargs) {
  if (name.is_null()) return {ActivationKind::none};
  ActivationArguments activation;
  const std::string op = short_name(name);
  if (op == "LeakyReLU")
    activation.kind = ActivationKind::leaky_relu;
  else if (op == "ReLU")
    activation.kind = ActivationKind::relu;
  else if (op == "GELU")
    activation.kind = ActivationKind::gelu;
  else if (op == "SiLU")
    activation.kind = ActivationKind::silu;
  else
    name.check_supported(false, "LeakyReLU, ReLU, GELU, SiLU");
  for (const auto& [key, value] : arguments(kwargs)) {
    if (key == "negative_slope" && op == "LeakyReLU")
      activation.negative_slope = value.number();
    else if (key == "approximate" && op == "GELU")
      value.check_supported(value.text() == "none", "none");
    else
      kwargs.check(key == "inplace", "has the unknown key \"", key, '"');
  }
  return activation;
}

/// The settings of a network that have different names in the two formats of plans.
struct Fields {
  bool residual;
  int64_t axes;  ///< 2 or 3
  std::vector<int64_t> features;
  Json kernel_sizes;
  Json strides;
  Json convs;          ///< convolutions or residual blocks in each stage of the encoder
  Json decoder_convs;  ///< convolutions in each stage of the decoder
};

UNetOptions build(const Fields& fields, int64_t in_channels, int64_t num_classes) {
  const size_t count = fields.features.size();
  const std::vector<Triple> kernel_sizes = triples(fields.kernel_sizes, count, fields.axes);
  const std::vector<Triple> strides = triples(fields.strides, count, fields.axes);
  constexpr int64_t kMaxConvs = 256;  // per stage, so that a wrong number does not allocate millions of layers
  const std::vector<int64_t> convs = per_stage(fields.convs, count);
  const std::vector<int64_t> decoder_convs = per_stage(fields.decoder_convs, count - 1);
  UNetOptions options{.in_channels = in_channels, .num_classes = num_classes, .residual = fields.residual};
  for (size_t i = 0; i < count; ++i) {
    // The file lists the stages of the decoder from the lowest to the highest resolution.
    const int64_t decoder = i + 1 < count ? decoder_convs[count - 2 - i] : 1;
    fields.convs.check(convs[i] >= 1 && convs[i] <= kMaxConvs, "must hold numbers from 1 to ", kMaxConvs);
    fields.decoder_convs.check(decoder >= 1 && decoder <= kMaxConvs, "must hold numbers from 1 to ", kMaxConvs);
    options.stages.push_back({fields.features[i], kernel_sizes[i], strides[i], convs[i], decoder});
  }
  return options;
}

bool read_class(const Json& name) {
  const std::string network = short_name(name);
  name.check_supported(network == "PlainConvUNet" || network == "ResidualEncoderUNet",
                       "PlainConvUNet, ResidualEncoderUNet, MedNeXt");
  return network == "ResidualEncoderUNet";
}

UNetOptions read_arch_kwargs(const Json& architecture, int64_t axes, int64_t in_channels, int64_t num_classes) {
  const bool residual = read_class(architecture.at("network_class_name"));
  const Json kwargs = architecture.at("arch_kwargs");
  const char* const convs = residual ? "n_blocks_per_stage" : "n_conv_per_stage";
  check_known(kwargs, {"n_stages", "features_per_stage", "conv_op", "kernel_sizes", "strides", convs,
                       "n_conv_per_stage_decoder", "conv_bias", "norm_op", "norm_op_kwargs", "dropout_op",
                       "dropout_op_kwargs", "nonlin", "nonlin_kwargs", "deep_supervision"});
  const int64_t stages = kwargs.at("n_stages").integer();
  kwargs.at("n_stages").check(stages >= 2 && stages <= 64, "must be 2 to 64, is ", stages);
  UNetOptions options =
      build({residual, axes, per_stage(kwargs.at("features_per_stage"), static_cast<size_t>(stages)),
             kwargs.at("kernel_sizes"), kwargs.at("strides"), kwargs.at(convs), kwargs.at("n_conv_per_stage_decoder")},
            in_channels, num_classes);
  options.bias = !kwargs.find("conv_bias").is_null() && kwargs.at("conv_bias").boolean();
  options.norm = read_norm(kwargs.find("norm_op"), kwargs.find("norm_op_kwargs"), axes);
  options.activation = read_activation(kwargs.find("nonlin"), kwargs.find("nonlin_kwargs"));
  return options;
}

MedNeXtOptions read_mednext(const Json& kwargs, int64_t in_channels, int64_t num_classes) {
  constexpr size_t kParts = 9;
  return {.in_channels = in_channels,
          .num_classes = num_classes,
          .channels = kwargs.at("channels").integer(),
          .kernel_size = kwargs.at("kernel_size").integer(),
          .blocks = per_stage(kwargs.at("blocks"), kParts),
          .expansion = per_stage(kwargs.at("expansion"), kParts)};
}

/// Reads the format of early nnU-Net v2, whose networks have a bias, InstanceNorm and LeakyReLU(0.01).
UNetOptions read_old_format(const Json& plan, int64_t axes, int64_t in_channels, int64_t num_classes) {
  const int64_t base = plan.at("UNet_base_num_features").integer(), max = plan.at("unet_max_num_features").integer();
  const auto is_valid = [](int64_t features) { return features >= 1 && features < int64_t{1} << 31; };
  plan.check(is_valid(base) && is_valid(max),
             "UNet_base_num_features and unet_max_num_features must lie in [1, 2^31), are ", base, " and ", max);
  const size_t count = plan.at("conv_kernel_sizes").items().size();
  plan.at("conv_kernel_sizes").check(count >= 2 && count <= 64, "must have 2 to 64 items, has ", count);
  std::vector<int64_t> features{std::min(base, max)};
  while (features.size() < count) features.push_back(std::min(2 * features.back(), max));
  return build(
      {read_class(plan.at("UNet_class_name")), axes, features, plan.at("conv_kernel_sizes"),
       plan.at("pool_op_kernel_sizes"), plan.at("n_conv_per_stage_encoder"), plan.at("n_conv_per_stage_decoder")},
      in_channels, num_classes);
}

}  // namespace

bool is_2d(const Json& configuration) {
  const Json patch = configuration.at("patch_size");
  const size_t axes = patch.items().size();
  patch.check(axes == 2 || axes == 3, "must have 2 or 3 items, has ", axes);
  return axes == 2;
}

NetworkOptions read_architecture(const Json& configuration, int64_t in_channels, int64_t num_classes) {
  const int64_t axes = is_2d(configuration) ? 2 : 3;
  const Json architecture = configuration.find("architecture");
  if (architecture.is_null()) return read_old_format(configuration, axes, in_channels, num_classes);
  if (short_name(architecture.at("network_class_name")) == "MedNeXt")
    return read_mednext(architecture.at("arch_kwargs"), in_channels, num_classes);
  const Json conv = architecture.at("arch_kwargs").at("conv_op");
  conv.check(short_name(conv) == concat("Conv", axes, 'd'), "must be Conv", axes, "d, because the patches have ", axes,
             " axes");
  return read_arch_kwargs(architecture, axes, in_channels, num_classes);
}

}  // namespace nnunet
