// Networks for segmentation, selected at run time.
#pragma once

#include <functional>
#include <memory>
#include <variant>

#include <voxgrad.h>

#include "examples/nnunet/mednext.h"

namespace nnunet {

using NetworkOptions = std::variant<voxgrad::nn::UNetOptions, MedNeXtOptions>;

struct Network {
  std::shared_ptr<voxgrad::nn::Layer> module;  ///< maps (N, C, D, H, W) to logits (N, classes, D, H, W)
  /// Returns the logits of all heads for deep_supervision_loss, highest resolution first.
  std::function<voxgrad::Tensors(const voxgrad::Tensor&)> levels;
};

/// Constructs the network of the options: nn::UNet or MedNeXt.
inline Network make_network(const NetworkOptions& options) {
  const auto make = [](const auto& network) -> Network {
    return {network, [network](const voxgrad::Tensor& x) { return network->levels(x); }};
  };
  if (const auto* mednext = std::get_if<MedNeXtOptions>(&options)) return make(std::make_shared<MedNeXt>(*mednext));
  return make(std::make_shared<voxgrad::nn::UNet>(std::get<voxgrad::nn::UNetOptions>(options)));
}

}  // namespace nnunet
