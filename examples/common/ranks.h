// What programs share that train on several GPUs.
#pragma once

#include <memory>
#include <vector>

#include <voxgrad.h>

namespace examples {

struct StepReport {
  double loss;       ///< the mean of all ranks
  bool interrupted;  ///< on any rank
};
/// Waits for the step of all ranks; of this one alone for no group.
inline StepReport report_step(const voxgrad::Tensor& loss, bool interrupted, voxgrad::parallel::Communicator* world) {
  if (!world) return {loss.item(), interrupted};
  const voxgrad::Tensor sums = voxgrad::full({2}, interrupted, {voxgrad::f64, loss.device()});
  sums.select(0, 0).copy_(loss.detach());
  world->all_reduce(sums);
  const std::vector<double> values = sums.to_vector();
  return {values[0] / world->size(), values[1] > 0};
}

/// A loader's order: one sample after the other, of each batch this rank's part, or all for no group.
inline std::shared_ptr<const voxgrad::data::Sampler> order_of_ranks(int64_t samples, int64_t batch,
                                                                    const voxgrad::parallel::Communicator* world) {
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
  voxgrad::parallel::launch(gpus, [&](voxgrad::parallel::Communicator& world) {
    auto own = f(&world);
    if (world.rank() == 0) result = std::move(own);
  });
  return result;
}

/// Throws unless GPUs can share batches of that size, and `device`, as given on the command line, leaves them the
/// choice.
inline void check_gpus(const char* program, int gpus, int64_t batch, const std::string& device, bool profile) {
  if (gpus == 0) return;
  // The profiler waits for all GPUs, of which the others wait for the rank that does so.
  voxgrad::check(gpus == 1 || !profile, program, "--profile is for one GPU, and --gpus is ", gpus);
  voxgrad::check(device == "auto" || device == "cuda", program, "--gpus takes the first GPUs, and --device is ",
                 device);
  voxgrad::check(gpus <= voxgrad::cuda::device_count(), program, "--gpus ", gpus, ", but there are ",
                 voxgrad::cuda::device_count());
  voxgrad::check(batch % gpus == 0, program, "a batch of ", batch, " cannot be shared out to ", gpus, " GPUs");
}

}  // namespace examples
