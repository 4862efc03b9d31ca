// A C interface to training and inference of nnU-Net's networks and MedNeXt for compare_unet.py, which times voxgrad
// and PyTorch alternately in one process. Work is queued on CUDA's default stream.
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>

#include "bench/run_caught.h"
#include "bench/unet_training.h"
#include "core/precision.h"
#include "cuda/cuda.h"
#include "examples/nnunet/mednext.h"

namespace {

using namespace voxgrad;

constexpr Device kDevice = Device::cuda();

/// The network of voxgrad_unet_make().
struct NetworkArguments {
  int64_t stages;          ///< number of stages of an nn::UNet
  int64_t channels;        ///< channels of the first stage
  int64_t max_channels;    ///< maximum number of channels of a stage of an nn::UNet
  int64_t classes;         ///< output channels
  int64_t mednext_kernel;  ///< 0: an nn::UNet; otherwise, a MedNeXt-B with this kernel size
  int residual;   ///< 1: nnU-Net's residual encoder with 1, 3, 4 and then 6 blocks per stage, and one convolution per
                  ///< stage of the decoder
  int recompute;  ///< 1: recompute activations in the backward pass
};

/// A training run that can also run inference and hold CUDA graphs.
struct Training : UNetTraining {
  using UNetTraining::UNetTraining;
  Tensor logits{};
  cuda::CUDAGraph step_graph{};
  cuda::CUDAGraph forward_graph{};

  void predict() {
    const NoGradGuard no_grad;
    const autocast guard(low.value_or(bf16), low.has_value());
    logits = model->forward(x);
  }
};
std::unique_ptr<Training> training;

/// Moves the model to the GPU, sets its parameters and starts the training.
template <class Network>
void start(const std::shared_ptr<Network>& model, bool deep, std::optional<DType> low, bool channels_last,
           const char** names, void** parameters, int64_t count) {
  model->to(kDevice);
  const NoGradGuard no_grad;
  const TensorMap state = model->state_dict();
  check(static_cast<int64_t>(state.size()) == count, "voxgrad_unet", "the model has ", state.size(),
        " parameters, got ", count);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = state.find(names[i]);
    check(found != state.end(), "voxgrad_unet", "the model has no parameter ", names[i]);
    found->second.copy_(from_blob(parameters[i], found->second.shape(), {f32, kDevice}, {}));
  }
  if (channels_last) model->to(MemoryFormat::channels_last);
  training = std::make_unique<Training>(model, deep, low);
}

}  // namespace

extern "C" {

/// Creates the model, which must have `count` parameters. Copies the f32 array parameters[i] in GPU memory to the
/// parameter with the name names[i]. The memory of x, f32 (batch, 1, size, size, size), and of target, i64 (batch,
/// size, size, size), must stay valid. deep: 1 for deep supervision. high: 1 for TF32. low: dtype of autocast (0 none,
/// 2 bf16, 3 f16). Like all functions in this file, returns null on success, otherwise an error message.
const char* voxgrad_unet_make(const NetworkArguments* network, int deep, int high, int low, int channels_last,
                              const char** names, void** parameters, int64_t count, void* x, void* target,
                              int64_t batch, int64_t size) {
  return run_caught([&] {
    training.reset();
    memory::empty_cache(kDevice);
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    const auto begin = [&](const auto& model) {
      start(model, deep != 0, low ? std::optional(static_cast<DType>(low)) : std::nullopt, channels_last != 0, names,
            parameters, count);
    };
    if (network->mednext_kernel > 0) {
      nnunet::MedNeXtOptions options = nnunet::mednext_preset(false);
      options.num_classes = network->classes;
      options.channels = network->channels;
      options.kernel_size = network->mednext_kernel;
      options.recompute = network->recompute != 0;
      begin(std::make_shared<nnunet::MedNeXt>(options));
    } else {
      nn::UNetOptions options = unet_options(network->stages, network->channels, network->max_channels,
                                             network->classes, network->recompute != 0);
      options.residual = network->residual != 0;
      for (size_t i = 0; options.residual && i < options.stages.size(); ++i) {
        constexpr int64_t kBlocks[] = {1, 3, 4, 6};
        options.stages[i].convs = kBlocks[std::min(i, std::size(kBlocks) - 1)];
        options.stages[i].decoder_convs = 1;
      }
      begin(std::make_shared<nn::UNet>(options));
    }
    training->x = from_blob(x, {batch, 1, size, size, size}, {f32, kDevice}, {});
    training->target = from_blob(target, {batch, size, size, size}, {i64, kDevice}, {});
    synchronize(kDevice);
  });
}

const char* voxgrad_unet_step() {
  return run_caught([] { training->step(); });
}
/// Computes the logits at full resolution without recording gradients.
const char* voxgrad_unet_forward() {
  return run_caught([] { training->predict(); });
}

/// Captures a training step or a forward pass in a CUDA graph. Run the step or the pass at least once before the
/// capture.
const char* voxgrad_unet_capture_step() {
  return run_caught([] { training->step_graph.capture([] { training->step(); }); });
}
const char* voxgrad_unet_capture_forward() {
  return run_caught([] { training->forward_graph.capture([] { training->predict(); }); });
}
const char* voxgrad_unet_replay_step() {
  return run_caught([] { training->step_graph.replay(); });
}
const char* voxgrad_unet_replay_forward() {
  return run_caught([] { training->forward_graph.replay(); });
}

/// Waits for the last step and stores its loss in `loss`.
const char* voxgrad_unet_loss(double* loss) {
  return run_caught([&] { *loss = training->loss.item(); });
}

/// Stores the peak memory since the last call in `bytes`. The peak includes the parameters and the optimizer state.
const char* voxgrad_unet_peak(int64_t* bytes) {
  return run_caught([&] {
    *bytes = memory::stats(kDevice).peak;
    memory::reset_peak(kDevice);
  });
}

/// Destroys the training run and frees its memory.
const char* voxgrad_unet_drop() {
  return run_caught([] {
    training.reset();
    memory::empty_cache(kDevice);
  });
}
}
