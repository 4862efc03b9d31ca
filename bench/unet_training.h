// Training of a network for segmentation, for the benchmarks bench/compare_unet.py and bench/scaling.cpp.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "core/autocast.h"
#include "core/autograd.h"
#include "nn/optim/clip.h"
#include "nn/optim/grad_scaler.h"
#include "nn/optim/optimizers.h"
#include "nn/unet.h"
#include "ops/loss.h"

namespace voxgrad {

/// Returns the options of a U-Net. The number of channels doubles from stage to stage, up to `max_channels`.
inline nn::UNetOptions unet_options(int64_t stages, int64_t channels, int64_t max_channels, int64_t classes,
                                    bool recompute = false) {
  nn::UNetOptions options{.num_classes = classes, .recompute = recompute};
  for (int64_t i = 0; i < stages; ++i)
    options.stages.push_back({.features = std::min(channels << i, max_channels), .stride = i ? 2 : 1});
  return options;
}

/// A training run. A step consists of the forward pass, the loss, the backward pass, gradient clipping and SGD.
struct UNetTraining {
  std::shared_ptr<nn::Layer> model;
  std::function<Tensors(const Tensor&)> levels;  ///< returns the logits of all resolutions; null: no deep supervision
  std::optional<DType> low;                      ///< dtype of autocast; nullopt: no autocast
  optim::SGD optimizer;
  optim::GradScaler scaler;
  Tensor x{};       ///< (N, 1, D, H, W)
  Tensor target{};  ///< (N, D, H, W)
  Tensor loss{};    ///< loss of the last step

  /// Prepares the training of `network`, a Layer with the member function levels().
  template <class Network>
  UNetTraining(std::shared_ptr<Network> network, bool deep_supervision, std::optional<DType> dtype)
      : model(network),
        low(dtype),
        optimizer(model->parameters(), {.lr = 0.01, .momentum = 0.99, .weight_decay = 3e-5, .nesterov = true}),
        scaler({.enabled = low == f16}) {
    if (deep_supervision) levels = [network](const Tensor& input) { return network->levels(input); };
  }

  void forward() {
    model->zero_grad();
    const autocast guard(low.value_or(bf16), low.has_value());
    const Tensors logits = levels ? levels(x) : Tensors{model->forward(x)};
    loss = deep_supervision_loss(logits, target, {.dice = {.batch = true, .include_background = false}});
  }
  void backward() {
    scaler.scale(loss).backward();
    loss = loss.detach();
  }
  void update() {
    if (scaler.is_enabled()) scaler.unscale_(optimizer);
    optim::clip_grad_norm_(model->parameters(), 12);
    scaler.step(optimizer);
    if (scaler.is_enabled()) scaler.update();
  }
  void step() {
    forward();
    backward();
    update();
  }
};

}  // namespace voxgrad
