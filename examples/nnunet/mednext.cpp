// Implements the network MedNeXt.
#include "examples/nnunet/mednext.h"

#include <algorithm>

namespace nnunet {

using namespace voxgrad;
using nn::Layer;

namespace {

constexpr int64_t kLevels = 5;  // number of resolutions of the network

/// The resolution of a block's result relative to the block's input.
enum class Resolution : uint8_t { same, half, twice };

class Block : public Layer {
 public:
  Block(int64_t in, int64_t out, int64_t expansion, int64_t kernel_size, Resolution resolution)
      : norm(std::make_shared<nn::GroupNorm>(in, in)), expand(in, expansion * in, 1), compress(expansion * in, out, 1) {
    const int64_t padding = kernel_size / 2;
    const auto begin_with = [&](const auto& conv) {
      depthwise.push_back(conv);
      normalized_->push_back(conv);
    };
    if (resolution == Resolution::twice) {
      begin_with(std::make_shared<nn::ConvTranspose3d>(in, in, kernel_size, 2, padding, 1, in));
      skip.push_back(nn::ConvTranspose3d(in, out, 1, 2, 0, 1));
    } else {
      const int64_t stride = resolution == Resolution::half ? 2 : 1;
      begin_with(std::make_shared<nn::Conv3d>(in, in, kernel_size, stride, padding, 1, in));
      if (stride == 2) skip.push_back(nn::Conv3d(in, out, 1, 2));
    }
    normalized_->push_back(norm);
  }
  Tensor forward(const Tensor& x) const override {
    return skip(x) + inverted_bottleneck((*normalized_)(x), expand.weight, expand.bias, compress.weight, compress.bias);
  }

  nn::Sequential depthwise;
  nn::Sequential skip;  // the identity if it is empty
  std::shared_ptr<nn::GroupNorm> norm;
  nn::Conv3d expand;
  nn::Conv3d compress;
  VG_MODULE(depthwise, skip, norm, expand, compress)

 private:
  /// The depthwise convolution and the norm, which are fused.
  std::unique_ptr<nn::Sequential> normalized_ = std::make_unique<nn::Sequential>();
};

void check_options(const MedNeXtOptions& o) {
  constexpr const char* kOp = "MedNeXt";
  constexpr int64_t kMax = 1024;  // so that a wrong number in a file does not allocate millions of layers
  const auto valid = [](const std::vector<int64_t>& list) {
    return std::ssize(list) == 2 * kLevels - 1 &&
           std::ranges::all_of(list, [](int64_t v) { return v > 0 && v <= kMax; });
  };
  check(o.in_channels > 0 && o.num_classes > 0 && o.channels > 0 && o.channels <= kMax, kOp,
        "in_channels and num_classes must be positive and channels must be 1 to ", kMax, ", got ", o.in_channels, ", ",
        o.num_classes, " and ", o.channels);
  check(o.kernel_size == 3 || o.kernel_size == 5, kOp, "kernel_size must be 3 or 5, got ", o.kernel_size);
  check(valid(o.blocks) && valid(o.expansion), kOp, "blocks and expansion must have nine numbers from 1 to ", kMax);
}

}  // namespace

MedNeXtOptions mednext_preset(bool large) {
  MedNeXtOptions options;
  options.blocks = {2, 2, 2, 2, 2, 2, 2, 2, 2};
  options.expansion = {2, 3, 4, 4, 4, 4, 4, 3, 2};
  if (large) options.blocks = options.expansion = {3, 4, 8, 8, 8, 8, 8, 4, 3};
  return options;
}

MedNeXt::MedNeXt(const MedNeXtOptions& o) : recompute_(o.recompute) {
  check_options(o);
  const auto channels = [&](int64_t level) { return o.channels << level; };
  const auto add_blocks = [&](int64_t level) {
    const size_t part = blocks_.size();
    auto stack = std::make_shared<nn::Sequential>();
    for (int64_t i = 0; i < o.blocks[part]; ++i)
      stack->push_back(Block(channels(level), channels(level), o.expansion[part], o.kernel_size, Resolution::same));
    blocks_.push_back(stack);
  };
  stem_ = std::make_shared<nn::Conv3d>(o.in_channels, o.channels, 1);
  for (int64_t level = 0; level < kLevels; ++level) {
    add_blocks(level);
    heads_.push_back(std::make_shared<nn::Conv3d>(channels(level), o.num_classes, 1));
    if (level + 1 < kLevels)
      down_.push_back(std::make_shared<Block>(channels(level), channels(level + 1), o.expansion[blocks_.size()],
                                              o.kernel_size, Resolution::half));
  }
  for (int64_t level = kLevels - 2; level >= 0; --level) {
    up_.push_back(std::make_shared<Block>(channels(level + 1), channels(level), o.expansion[blocks_.size()],
                                          o.kernel_size, Resolution::twice));
    add_blocks(level);
  }
}

Tensor MedNeXt::run(const std::shared_ptr<Layer>& layer, const Tensor& x) const {
  if (!recompute_ || !grad_enabled()) return layer->forward(x);
  return nn::recompute([layer](const Tensor& t) { return layer->forward(t); }, x);
}

Tensors MedNeXt::levels(const Tensor& input) const {
  Tensors features;
  Tensor x = run(stem_, input);
  for (size_t level = 0; level < kLevels; ++level) {
    features.push_back(run(blocks_[level], x));
    if (level < down_.size()) x = run(down_[level], features.back());
  }
  Tensors logits{heads_.back()->forward(features.back())};
  x = features.back();
  for (size_t i = 0; i < up_.size(); ++i) {
    const size_t level = kLevels - 2 - i;
    x = run(blocks_[kLevels + i], features[level] + run(up_[i], x));
    logits.insert(logits.begin(), heads_[level]->forward(x));
  }
  return logits;
}

nn::Members MedNeXt::members() {
  nn::Members list{{"stem", {}, false, stem_.get()}};
  const auto add = [&](const char* name, const std::vector<std::shared_ptr<Layer>>& layers) {
    for (size_t i = 0; i < layers.size(); ++i) list.push_back({concat(name, '.', i), {}, false, layers[i].get()});
  };
  add("blocks", blocks_);
  add("down", down_);
  add("up", up_);
  add("heads", heads_);
  return list;
}

TensorMap upkern(const TensorMap& state, nn::Module& network) {
  TensorMap result = state;
  for (const auto& [name, target] : network.state_dict()) {
    const auto found = result.find(name);
    if (found == result.end() || target.dim() != 5 || found->second.dim() != 5) continue;
    const Shape &from = found->second.shape(), &to = target.shape();
    if (from[0] != to[0] || from[1] != to[1] || from == to) continue;
    found->second = interpolate(found->second, {.size = Dims{to[2], to[3], to[4]}, .mode = InterpolateMode::trilinear});
  }
  return result;
}

}  // namespace nnunet
