// The U-Net of compare_unet.py behind a C interface, so that it and its twin in PyTorch are timed in one process, in
// turn. Work is queued on CUDA's default stream.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bench/run_caught.h"
#include "core/autocast.h"
#include "core/autograd.h"
#include "core/precision.h"
#include "cuda/cuda.h"
#include "nn/layers.h"
#include "nn/optim/clip.h"
#include "nn/optim/grad_scaler.h"
#include "nn/optim/optimizers.h"
#include "ops/loss.h"
#include "ops/shape.h"

namespace {

using namespace voxgrad;

/// Two convolutions, each with a norm and an activation; the first may be strided.
nn::Sequential block(int64_t in, int64_t out, int64_t stride) {
  return nn::Sequential{
      nn::Conv3d{{.in_channels = in, .out_channels = out, .kernel_size = 3, .stride = stride, .padding = 1}},
      nn::InstanceNorm3d{out, {.affine = true}},
      nn::LeakyReLU{0.01},
      nn::Conv3d{{.in_channels = out, .out_channels = out, .kernel_size = 3, .padding = 1}},
      nn::InstanceNorm3d{out, {.affine = true}},
      nn::LeakyReLU{0.01}};
}

struct UNet : nn::Module {
  UNet(int64_t levels, int64_t channels, int64_t classes)
      : head{{.in_channels = channels, .out_channels = classes, .kernel_size = 1}} {
    for (int64_t i = 0; i < levels; ++i) down.push_back(block(i ? channels << (i - 1) : 1, channels << i, i ? 2 : 1));
    for (int64_t i = levels - 1; i-- > 0;) {
      const int64_t out = channels << i;
      up.emplace_back(
          nn::ConvTranspose3d::Options{.in_channels = 2 * out, .out_channels = out, .kernel_size = 2, .stride = 2});
      join.push_back(block(2 * out, out, 1));
    }
  }
  Tensor forward(Tensor x) const {
    Tensors skips;
    for (const nn::Sequential& stage : down) skips.push_back(x = stage(x));
    for (size_t i = 0; i < up.size(); ++i) x = join[i](cat({up[i](x), skips[skips.size() - 2 - i]}, 1));
    return head(x);
  }

  std::vector<nn::Sequential> down, join;
  std::vector<nn::ConvTranspose3d> up;
  nn::Conv3d head;
  VG_MODULE(down, up, join, head)
};

constexpr Device kDevice = Device::cuda();

/// A model in training: forward, loss, backward, clipping and a step of SGD.
struct Training {
  UNet model;
  Tensor x, target, loss;
  std::optional<DType> low;
  optim::SGD optimizer;
  optim::GradScaler scaler;
  cuda::CUDAGraph graph;

  Training(UNet made, std::optional<DType> dtype)
      : model(std::move(made)),
        low(dtype),
        optimizer(model.parameters(), {.lr = 0.01, .momentum = 0.99, .weight_decay = 3e-5, .nesterov = true}),
        scaler({.enabled = low == f16}) {}

  void step() {
    model.zero_grad();
    {
      const autocast guard(low.value_or(bf16), low.has_value());
      loss = dice_ce_loss(model.forward(x), target, {.dice = {.batch = true, .include_background = false}});
    }
    scaler.scale(loss).backward();
    if (scaler.is_enabled()) scaler.unscale_(optimizer);
    optim::clip_grad_norm_(model.parameters(), 12);
    scaler.step(optimizer);
    if (scaler.is_enabled()) scaler.update();
    loss = loss.detach();
  }
};
std::unique_ptr<Training> training;

}  // namespace

extern "C" {

/// A model with the values of `parameters`, in order, whose memory may go afterwards; x (batch, 1, size, size, size)
/// f32 and target (batch, size, size, size) i64 must stay. low: 0 none, 2 bf16, 3 f16.
const char* voxgrad_unet_make(int64_t levels, int64_t channels, int64_t classes, int high, int low, int channels_last,
                              void** parameters, int64_t count, void* x, void* target, int64_t batch, int64_t size) {
  return run_caught([&] {
    training.reset();
    memory::empty_cache(kDevice);
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    UNet model(levels, channels, classes);
    model.to(kDevice);
    const Tensors own = model.parameters();
    check(static_cast<int64_t>(own.size()) == count, "voxgrad_unet", "has ", own.size(), " parameters, not ", count);
    NoGradGuard no_grad;
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(from_blob(parameters[i], own[i].shape(), {f32, kDevice}, {}));
    if (channels_last) model.to(MemoryFormat::channels_last);
    training =
        std::make_unique<Training>(std::move(model), low ? std::optional(static_cast<DType>(low)) : std::nullopt);
    training->x = from_blob(x, {batch, 1, size, size, size}, {f32, kDevice}, {});
    training->target = from_blob(target, {batch, size, size, size}, {i64, kDevice}, {});
    synchronize(kDevice);
  });
}

const char* voxgrad_unet_step() {
  return run_caught([] { training->step(); });
}

/// Captures a step, for voxgrad_unet_replay.
const char* voxgrad_unet_capture() {
  return run_caught([] { training->graph.capture([] { training->step(); }); });
}
const char* voxgrad_unet_replay() {
  return run_caught([] { training->graph.replay(); });
}

/// Of the last step. Waits for it.
const char* voxgrad_unet_loss(double* loss) {
  return run_caught([&] { *loss = training->loss.item(); });
}

/// The most memory since the last call; everything of the model counts.
const char* voxgrad_unet_peak(int64_t* bytes) {
  return run_caught([&] {
    *bytes = memory::stats(kDevice).peak;
    memory::reset_peak(kDevice);
  });
}

const char* voxgrad_unet_drop() {
  return run_caught([] {
    training.reset();
    memory::empty_cache(kDevice);
  });
}
}
