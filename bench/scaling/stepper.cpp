// Implements the training steps that the benchmark times.
#include "bench/scaling/stepper.h"

#include "bench/scaling/simulated.h"
#include "core/precision.h"
#include "core/random.h"
#include "ops/create.h"
#include "ops/elementwise.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

constexpr int64_t kStages = 6;
constexpr int64_t kChannels = 32;  // channels of the first stage
constexpr int64_t kMaxChannels = 320;
constexpr int64_t kClasses = 3;

/// Sets the float32 precision, which all ranks of this process share. The barriers ensure that no rank runs a step
/// while the precision changes.
void set_precision(const Bench& bench, const std::string& mode) {
  bench.world.barrier();
  vg::set_float32_precision(mode == "highest" ? vg::Float32Precision::highest : vg::Float32Precision::high);
  bench.world.barrier();
}

std::unique_ptr<vg::UNetTraining> make_training(const Bench& bench, const std::string& mode) {
  vg::manual_seed(0);
  const auto model = std::make_shared<vg::nn::UNet>(vg::unet_options(kStages, kChannels, kMaxChannels, kClasses));
  model->to(bench.device());
  model->to(vg::MemoryFormat::channels_last);
  auto training =
      std::make_unique<vg::UNetTraining>(model, true, mode == "bf16" ? std::optional(vg::bf16) : std::nullopt);
  const int64_t batch = bench.options.batch, size = bench.options.size;
  vg::Generator random(static_cast<uint64_t>(1 + bench.world.rank()));
  set_volumes(*training, vg::randn({batch, 1, size, size, size}, {.device = bench.device()}, &random));
  return training;
}

/// Runs a step with simulated collectives, to load all kernels. CUDA loads a kernel at its first launch and may then
/// wait for the device. If a real collective on this device were waiting for other ranks, this would cause a deadlock.
void load_kernels(const Bench& bench, const std::string& mode, const vg::nn::DataParallelOptions& parallel_options) {
  SimulatedCommunicator alone(bench.device(), {.ranks = 2});
  const auto training = make_training(bench, mode);
  const vg::nn::DataParallel parallel(*training->model, alone, parallel_options);
  training->step();
  bench.world.barrier();
}

}  // namespace

void set_volumes(vg::UNetTraining& training, const vg::Tensor& x) {
  training.x = x;
  training.target = ((x > 0.5).to(vg::u8) + (x > 1.0).to(vg::u8)).select(1, 0).contiguous();
}

Stepper::Stepper(const Bench& bench, vg::distributed::Communicator& world, const std::string& mode,
                 const std::string& scheme) {
  const vg::nn::DataParallelOptions parallel_options{.reduce_dtype = vg::parse_dtype(bench.options.wire),
                                                     .bucket_cap_mb = bench.options.bucket_mb};
  set_precision(bench, mode);
  load_kernels(bench, mode, parallel_options);
  training = make_training(bench, mode);
  if (scheme == "none") return;
  parallel.emplace(*training->model, world, parallel_options);
  if (scheme == "zero") zero.emplace(training->optimizer, world);
}

void Stepper::step(bool reduce) {
  if (!parallel || reduce) return training->step();
  const auto guard = parallel->no_sync();
  training->step();
}

int64_t Stepper::parameters() const {
  int64_t count = 0;
  for (const vg::Tensor& parameter : training->model->parameters()) count += parameter.numel();
  return count;
}

// FNV-1a over 32-bit words.
uint64_t Stepper::checksum() const {
  uint64_t hash = 0xcbf29ce484222325;
  for (const vg::Tensor& parameter : training->model->parameters()) {
    const vg::Tensor values = parameter.detach().to(vg::Device::cpu()).contiguous();
    const auto* words = static_cast<const uint32_t*>(values.raw_data());
    for (int64_t i = 0; i < values.numel(); ++i) hash = (hash ^ words[i]) * 0x100000001b3;
  }
  return hash;
}

Execution::Execution(const Bench& bench, bool graph, std::function<void()> step) : step_(std::move(step)) {
  for (int i = 0; i < bench.options.warmup; ++i) step_();
  if (graph) {
    // A capture frees memory, and freeing memory waits for the device. If another rank started a collective at the
    // same time, this could cause a deadlock.
    bench.world.barrier();
    graph_.emplace(bench.device().index).capture(step_);
    bench.world.barrier();
  }
  (*this)();  // one more step, eager or replayed, so that both kinds of execution take the same number of steps
}

void each_execution(const Bench& bench, const std::function<void(bool graph)>& f) {
  f(false);
  if (bench.options.graph) f(true);
}

}  // namespace scaling
