// Helpers for training on one or several GPUs: they collect losses, divide batches among ranks, and start ranks.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <voxgrad.h>

namespace examples {

/// The outcome of a training step.
struct StepReport {
  double loss;       ///< mean over all ranks
  bool interrupted;  ///< true if any rank was interrupted
};

/// Collects the loss and the interrupt flag of each step from all ranks. If `world` is null, there is only one rank. On
/// a GPU, the report of a step becomes available when the next step is added, so that the GPU does not wait for the
/// host.
class StepReports {
 public:
  StepReports(voxgrad::Device device, voxgrad::distributed::Communicator* world) : world_(world) {
    if (device.is_cuda()) stream_.emplace(device.index);
  }

  /// Adds a step. Returns the available reports that have not been returned before. On a GPU, the report of this step
  /// is included only if `wait` is true.
  std::vector<StepReport> add(const voxgrad::Tensor& loss, bool interrupted, bool wait) {
    Pending step{voxgrad::full({2}, interrupted, {voxgrad::f64, loss.device()})};
    step.values.select(0, 0).copy_(loss.detach());
    if (world_) step.work = world_->all_reduce_async(step.values);
    if (stream_) (step.ready = std::make_unique<voxgrad::cuda::Event>(stream_->device(), false))->record();
    pending_.push_back(std::move(step));
    return read(stream_ && !wait ? 1 : 0);
  }
  /// Returns the remaining reports.
  std::vector<StepReport> finish() { return read(0); }

 private:
  struct Pending {
    voxgrad::Tensor values;                              // {loss, interrupted}
    std::unique_ptr<voxgrad::cuda::Event> ready{};       // recorded after `values` is written; null on the CPU
    std::unique_ptr<voxgrad::distributed::Work> work{};  // reduction over the ranks; null if there is only one rank
  };

  /// Returns all reports except the last `left`. Copies the values to the host on a separate stream, so that the host
  /// does not wait for later steps.
  std::vector<StepReport> read(size_t left) {
    std::optional<voxgrad::cuda::StreamGuard> guard;
    if (stream_) guard.emplace(*stream_);
    std::vector<StepReport> reports;
    for (; pending_.size() > left; pending_.pop_front()) {
      const Pending& step = pending_.front();
      if (step.ready) step.ready->wait();
      if (step.work) step.work->wait();
      const std::vector<double> values = step.values.to_vector();
      reports.push_back({values[0] / (world_ ? world_->size() : 1), values[1] > 0});
    }
    return reports;
  }

  voxgrad::distributed::Communicator* world_;
  std::optional<voxgrad::cuda::Stream> stream_;
  std::deque<Pending> pending_;
};

/// Returns a sampler that selects `samples` samples in sequential order. If `world` is not null, the sampler selects
/// only this rank's part of each batch of `batch` samples.
inline std::shared_ptr<const voxgrad::data::Sampler> make_sampler(int64_t samples, int64_t batch,
                                                                  const voxgrad::distributed::Communicator* world) {
  const auto all = std::make_shared<voxgrad::data::SequentialSampler>(samples);
  if (!world) return all;
  return std::make_shared<voxgrad::data::DistributedSampler>(
      all, voxgrad::data::DistributedSamplerOptions{world->size(), world->rank(), batch});
}

/// Calls f(nullptr) if `gpus` is 0. Otherwise, starts a rank on one thread per GPU, calls f(&world) on each rank, and
/// returns the result of rank 0.
template <class F>
auto train_on(int gpus, const F& f) {
  if (gpus == 0) return f(nullptr);
  decltype(f(nullptr)) result{};
  voxgrad::distributed::launch(gpus, [&](voxgrad::distributed::Communicator& world) {
    auto rank_result = f(&world);
    if (world.rank() == 0) result = std::move(rank_result);
  });
  return result;
}

/// Throws voxgrad::Error if the machine has fewer than `gpus` GPUs or if `batch` is not divisible by `gpus`.
inline void check_gpus(const char* program, int gpus, int64_t batch) {
  if (gpus == 0) return;
  const int available = voxgrad::cuda::device_count();
  if (available == 0) voxgrad::synchronize(voxgrad::Device::cuda());  // throws Error with the reason
  voxgrad::check(gpus <= available, program, "--gpus is ", gpus, ", but this machine has ", available,
                 available == 1 ? " GPU" : " GPUs");
  voxgrad::check(batch % gpus == 0, program, "a batch of ", batch, batch == 1 ? " sample" : " samples",
                 " cannot be divided among ", gpus, " GPUs");
}

}  // namespace examples
