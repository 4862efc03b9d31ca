// Implements the U-Nets of nnU-Net v2.
#include "nn/unet.h"

#include "core/autograd.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "ops/detail/checks.h"
#include "ops/shape.h"

namespace voxgrad::nn {
namespace {

/// A convolution, a normalization and, if `activated`, an activation, which run as one operation. With stride 1, the
/// padding keeps the spatial size.
class ConvNorm : public Layer {
 public:
  ConvNorm(const UNetOptions& options, int64_t in, int64_t out, const Triple& kernel_size, const Triple& stride,
           bool activated = true, bool is_skip = false)
      : conv_(in, out, kernel_size, stride, {kernel_size[0] / 2, kernel_size[1] / 2, kernel_size[2] / 2}, 1, 1,
              options.bias && !is_skip) {
    if (activated) activation_ = options.activation;
    if (!options.norm) return;
    const auto [batch, affine, eps] = *options.norm;
    if (batch)
      norm_ = std::make_shared<BatchNorm3d>(out, BatchNorm3d::Options{.eps = eps, .affine = affine});
    else
      norm_ = std::make_shared<InstanceNorm3d>(out, InstanceNormOptions{.eps = eps, .affine = affine});
  }
  Tensor forward(const Tensor& x) const override { return forward(x, {}, activation_); }
  /// Adds the residual, if defined, before the activation.
  Tensor forward(const Tensor& x, const Tensor& residual, const ActivationArguments& activation) const {
    const NormArguments norm = norm_ ? norm_->arguments() : NormArguments();
    const Tensor y = conv_.forward(x, {.norm = norm, .activation = activation, .residual = residual});
    if (norm_) norm_->count_batch();
    return y;
  }
  Members members() override {
    Members list{{"conv", {}, false, &conv_}};
    if (norm_) list.push_back({"norm", {}, false, norm_.get()});
    return list;
  }

 private:
  Conv3d conv_;
  std::shared_ptr<ChannelNorm> norm_;
  ActivationArguments activation_{};
};

/// The residual block BasicBlockD of nnU-Net, based on ResNet-D (He et al., "Bag of tricks for image classification",
/// CVPR 2019).
class ResidualBlock : public Layer {
 public:
  ResidualBlock(const UNetOptions& options, int64_t in, int64_t out, const Triple& kernel_size, const Triple& stride)
      : conv1(options, in, out, kernel_size, stride),
        conv2(options, out, out, kernel_size, 1, false),
        activation_(options.activation) {
    if (!(stride == 1)) skip.push_back(AvgPool3d(stride, stride));
    if (in != out) skip.push_back(ConvNorm(options, in, out, 1, 1, false, true));
  }
  Tensor forward(const Tensor& x) const override { return detail::forward(conv2, conv1(x), skip(x), activation_); }

  ConvNorm conv1, conv2;
  Sequential skip;
  VG_MODULE(conv1, conv2, skip)

 private:
  ActivationArguments activation_;
};

/// Returns a sequence of `count` parts (ConvNorm or ResidualBlock). The first part changes the number of channels and
/// the spatial size.
template <class Part>
std::shared_ptr<Layer> stack_of(const UNetOptions& options, int64_t count, int64_t in, int64_t out,
                                const Triple& kernel_size, const Triple& stride) {
  auto parts = std::make_shared<Sequential>();
  for (int64_t i = 0; i < count; ++i)
    parts->push_back(Part(options, i == 0 ? in : out, out, kernel_size, i == 0 ? stride : Triple(1)));
  return parts;
}

void check_options(const UNetOptions& options) {
  constexpr const char* kOp = "UNet";
  check(options.in_channels > 0 && options.num_classes > 0, kOp, "in_channels and num_classes must be positive, got ",
        options.in_channels, " and ", options.num_classes);
  if (options.norm) check_eps(kOp, options.norm->eps);
  check(options.stages.size() >= 2, kOp, "needs at least two stages, got ", options.stages.size());
  check(options.stages[0].stride == 1, kOp, "the first stage must have stride 1, got ", options.stages[0].stride);
  double total[3] = {1, 1, 1};  // product of the strides along each axis
  for (size_t i = 0; i < options.stages.size(); ++i) {
    const UNetStage& stage = options.stages[i];
    check(stage.features > 0 && stage.convs > 0 && stage.decoder_convs > 0, kOp,
          "features, convs and decoder_convs of stage ", i, " must be positive, got ", stage.features, ", ",
          stage.convs, " and ", stage.decoder_convs);
    for (int axis = 0; axis < 3; ++axis) {
      check(stage.kernel_size[axis] > 0 && stage.kernel_size[axis] % 2 == 1 && stage.stride[axis] > 0, kOp, "stage ", i,
            " must have odd kernel sizes and positive strides, got ", stage.kernel_size, " and ", stage.stride);
      total[axis] *= static_cast<double>(stage.stride[axis]);
      check(total[axis] < 0x1p31, kOp, "the product of the strides up to stage ", i, " must be below 2^31, got ",
            total[axis]);
    }
  }
}

}  // namespace

UNet::UNet(const Options& options) : options_(options) {
  check_options(options);
  make_layers();
  initialize();
}

void UNet::make_layers() {
  const init::SkipInit skip;  // initialize() sets the weights
  const Options& options = options_;
  const std::vector<Stage>& stages = options.stages;
  const auto make = options.residual ? stack_of<ResidualBlock> : stack_of<ConvNorm>;
  int64_t in = options.in_channels;
  if (options.residual) {
    stem_ = stack_of<ConvNorm>(options, 1, in, stages[0].features, stages[0].kernel_size, 1);
    in = stages[0].features;
  }
  for (const Stage& stage : stages) {
    encoder_.push_back(make(options, stage.convs, in, stage.features, stage.kernel_size, stage.stride));
    in = stage.features;
  }
  for (size_t i = stages.size() - 1; i-- > 0;) {
    const Stage &here = stages[i], &below = stages[i + 1];
    const int64_t features = here.features;
    decoder_.push_back(
        {std::make_shared<ConvTranspose3d>(below.features, features, below.stride, below.stride, 0, 0, 1, options.bias),
         stack_of<ConvNorm>(options, here.decoder_convs, 2 * features, features, here.kernel_size, 1),
         std::make_shared<Conv3d>(features, options.num_classes, 1)});
  }
}

void UNet::initialize() {
  const ActivationArguments& activation = options_.activation;
  const double slope = activation.kind == ActivationKind::leaky_relu ? activation.negative_slope : 0;
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() > 1) init::kaiming_normal_(parameter, {.a = slope});
    if (name.ends_with("bias")) init::zeros_(parameter);
    if (options_.residual && name.ends_with("conv2.norm.weight")) init::zeros_(parameter);
  }
}

Tensor UNet::run(std::function<Tensor(Tensors)> stage, Tensors inputs) const {
  if (!options_.recompute || !grad_enabled()) return stage(std::move(inputs));
  return autograd::recompute([f = std::move(stage)](const Tensors& in) { return Tensors{f(in)}; }, inputs)[0];
}

Tensors UNet::encode(const Tensor& x) const {
  Tensors outputs;
  for (size_t i = 0; i < encoder_.size(); ++i) {
    const auto stage = [convs = encoder_[i], stem = i == 0 ? stem_ : nullptr](Tensors in) {
      return convs->forward(stem ? stem->forward(in[0]) : in[0]);
    };
    outputs.push_back(run(stage, {i == 0 ? x : outputs.back()}));
  }
  return outputs;
}

Tensors UNet::decode(const Tensor& x, bool all) const {
  check(x.defined() && x.dim() == 5 && x.size(1) == options_.in_channels, "UNet", "input must be (N, ",
        options_.in_channels, ", D, H, W), got ", describe(x));
  const Triple divisor = total_stride();
  for (int axis = 0; axis < 3; ++axis)
    check(x.size(axis + 2) > 0 && x.size(axis + 2) % divisor[axis] == 0, "UNet", "D, H and W must be multiples of ",
          divisor, ", the product of the strides; the input is ", x.shape());
  Tensors features = encode(x), logits;
  for (const Level& level : decoder_) {
    const auto stage = [level](Tensors in) {
      const Tensor joined = (*level.up)(in[0], NormActivation{.appended = in[1]});
      in.clear();  // if no graph is recorded, frees the features before the convolutions run
      return level.convs->forward(joined);
    };
    Tensors inputs{features.back(), features[features.size() - 2]};
    features.erase(features.end() - 2, features.end());
    features.push_back(run(stage, std::move(inputs)));
    if (all || features.size() == 1) logits.insert(logits.begin(), level.head->forward(features.back()));
  }
  return logits;
}

Members UNet::members() {
  Members list;
  const auto add = [&](Module* module, const auto&... name) { list.push_back({concat(name...), {}, false, module}); };
  if (stem_) add(stem_.get(), "encoder.stem.convs");
  for (size_t i = 0; i < encoder_.size(); ++i)
    add(encoder_[i].get(), "encoder.stages.", i, options_.residual ? ".blocks" : ".0.convs");
  for (size_t i = 0; i < decoder_.size(); ++i) add(decoder_[i].convs.get(), "decoder.stages.", i, ".convs");
  for (size_t i = 0; i < decoder_.size(); ++i) add(decoder_[i].up.get(), "decoder.transpconvs.", i);
  for (size_t i = 0; i < decoder_.size(); ++i) add(decoder_[i].head.get(), "decoder.seg_layers.", i);
  return list;
}

}  // namespace voxgrad::nn
