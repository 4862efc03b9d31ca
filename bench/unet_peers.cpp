// The U-Nets of compare_unet.py behind a C interface, so that they and their twins in PyTorch are timed in one process,
// in turn. Work is queued on CUDA's default stream.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bench/run_caught.h"
#include "bench/unet_training.h"
#include "core/precision.h"
#include "cuda/cuda.h"

namespace {

using namespace voxgrad;

constexpr Device kDevice = Device::cuda();

/// With what compare_unet.py times beside the step.
struct Training : UNetTraining {
  using UNetTraining::UNetTraining;
  Tensor logits{};
  cuda::CUDAGraph step_graph{}, forward_graph{};

  void predict() {
    const NoGradGuard no_grad;
    const autocast guard(low.value_or(bf16), low.has_value());
    logits = model.forward(x);
  }
};
std::unique_ptr<Training> training;

}  // namespace

extern "C" {

/// A model with the values of `parameters`, by their names, whose memory may go afterwards; x (batch, 1, size, size,
/// size) f32 and target (batch, size, size, size) i64 must stay. low: 0 none, 2 bf16, 3 f16. deep: deep supervision.
const char* voxgrad_unet_make(int64_t stages, int64_t channels, int64_t most_channels, int64_t classes, int deep,
                              int recompute, int high, int low, int channels_last, const char** names,
                              void** parameters, int64_t count, void* x, void* target, int64_t batch, int64_t size) {
  return run_caught([&] {
    training.reset();
    memory::empty_cache(kDevice);
    set_float32_precision(high ? Float32Precision::high : Float32Precision::highest);
    nn::UNet model(unet_options(stages, channels, most_channels, classes, recompute != 0));
    model.to(kDevice);
    const NoGradGuard no_grad;
    const TensorMap own = model.state_dict();
    check(static_cast<int64_t>(own.size()) == count, "voxgrad_unet", "has ", own.size(), " parameters, not ", count);
    for (int64_t i = 0; i < count; ++i) {
      const auto found = own.find(names[i]);
      check(found != own.end(), "voxgrad_unet", "has no parameter ", names[i]);
      found->second.copy_(from_blob(parameters[i], found->second.shape(), {f32, kDevice}, {}));
    }
    if (channels_last) model.to(MemoryFormat::channels_last);
    training = std::make_unique<Training>(std::move(model), deep != 0,
                                          low ? std::optional(static_cast<DType>(low)) : std::nullopt);
    training->x = from_blob(x, {batch, 1, size, size, size}, {f32, kDevice}, {});
    training->target = from_blob(target, {batch, size, size, size}, {i64, kDevice}, {});
    synchronize(kDevice);
  });
}

const char* voxgrad_unet_step() {
  return run_caught([] { training->step(); });
}
/// The logits of full resolution, without what a gradient needs.
const char* voxgrad_unet_forward() {
  return run_caught([] { training->predict(); });
}

/// Captures what the two above do, each after it ran at least once, for the replays.
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
