// What programs share that train on a GPU or several: reports of steps, shares of batches, ranks.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <voxgrad.h>

namespace examples {

struct StepReport {
  double loss;       ///< the mean of all ranks
  bool interrupted;  ///< on any rank
};

/// What all ranks, or this one alone for no group, tell of their steps. On a GPU a step is reported when the next one
/// is queued, so that the GPU does not wait for the host.
class StepReports {
 public:
  StepReports(voxgrad::Device device, voxgrad::distributed::Communicator* world) : world_(world) {
    if (device.is_cuda()) stream_.emplace(device.index);
  }

  /// After a step: the reports that have not been returned yet but, on a GPU and without `wait`, this step's.
  std::vector<StepReport> add(const voxgrad::Tensor& loss, bool interrupted, bool wait) {
    Pending step{voxgrad::full({2}, interrupted, {voxgrad::f64, loss.device()})};
    step.values.select(0, 0).copy_(loss.detach());
    if (world_) step.work = world_->all_reduce_async(step.values);
    if (stream_) (step.made = std::make_unique<voxgrad::cuda::Event>(stream_->device(), false))->record();
    pending_.push_back(std::move(step));
    return read(stream_ && !wait ? 1 : 0);
  }
  /// The rest of them.
  std::vector<StepReport> finish() { return read(0); }

 private:
  struct Pending {
    voxgrad::Tensor values;                              // loss, interrupted
    std::unique_ptr<voxgrad::cuda::Event> made{};        // on a GPU
    std::unique_ptr<voxgrad::distributed::Work> work{};  // of several ranks
  };

  /// All but the last `left`, on a stream that does not wait for the steps behind them.
  std::vector<StepReport> read(size_t left) {
    std::optional<voxgrad::cuda::StreamGuard> guard;
    if (stream_) guard.emplace(*stream_);
    std::vector<StepReport> reports;
    for (; pending_.size() > left; pending_.pop_front()) {
      const Pending& step = pending_.front();
      if (step.made) step.made->wait();
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

/// A loader's order: one sample after the other, of each batch this rank's part, or all for no group.
inline std::shared_ptr<const voxgrad::data::Sampler> order_of_ranks(int64_t samples, int64_t batch,
                                                                    const voxgrad::distributed::Communicator* world) {
  const auto all = std::make_shared<voxgrad::data::SequentialSampler>(samples);
  if (!world) return all;
  return std::make_shared<voxgrad::data::DistributedSampler>(
      all, voxgrad::data::DistributedSamplerOptions{world->size(), world->rank(), batch});
}

/// f(nullptr) where `gpus` is 0, else f in a thread for each of so many GPUs. What f returns on rank 0.
template <class F>
auto train_on(int gpus, const F& f) {
  if (gpus == 0) return f(nullptr);
  decltype(f(nullptr)) result{};
  voxgrad::distributed::launch(gpus, [&](voxgrad::distributed::Communicator& world) {
    auto own = f(&world);
    if (world.rank() == 0) result = std::move(own);
  });
  return result;
}

/// Throws unless there are `gpus` GPUs and they can share batches of `batch` samples.
inline void check_gpus(const char* program, int gpus, int64_t batch) {
  if (gpus == 0) return;
  voxgrad::check(gpus <= voxgrad::cuda::device_count(), program, "--gpus is ", gpus, ", but this machine has ",
                 voxgrad::cuda::device_count(), " GPUs");
  voxgrad::check(batch % gpus == 0, program, "a batch of ", batch, " samples cannot be divided among ", gpus, " GPUs");
}

}  // namespace examples
