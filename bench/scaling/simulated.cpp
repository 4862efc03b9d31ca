#include "bench/scaling/simulated.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "bench/scaling/kernels.h"
#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/shape.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

/// What is queued behind wait() comes after the reduction; the host does not wait.
class SimulatedWork final : public vg::parallel::Work {
 public:
  SimulatedWork(const vg::Tensor& tensor, int device) : over(device), tensor_(tensor) {}
  ~SimulatedWork() override { SimulatedWork::wait(); }
  SimulatedWork(const SimulatedWork&) = delete;
  SimulatedWork& operator=(const SimulatedWork&) = delete;
  bool test() override { return false; }
  void wait() override {
    if (!std::exchange(waited_, true)) over.wait();
  }

  vg::cuda::Event over;

 private:
  vg::Tensor tensor_;
  bool waited_ = false;
};

double bytes_of(const vg::Tensor& tensor) {
  return static_cast<double>(tensor.numel() * vg::item_size(tensor.dtype()));
}

/// Of tensors on the CPU, which take no time.
class Done final : public vg::parallel::Work {
 public:
  bool test() override { return true; }
  void wait() override {}
};

}  // namespace

SimulatedCommunicator::SimulatedCommunicator(vg::Device device, const Simulation& simulation)
    : device_(device), simulation_(simulation), stream_(device.index) {
  vg::check(simulation.ranks > 1, "simulate", "needs at least two ranks, got ", simulation.ranks);
}

double SimulatedCommunicator::latency_us() const {
  const auto ranks = static_cast<unsigned>(simulation_.ranks);
  const double steps = simulation_.algorithm == "ring" ? ranks - 1 : std::bit_width(ranks - 1);
  return 2 * steps * simulation_.latency_us;
}

std::unique_ptr<vg::parallel::Work> SimulatedCommunicator::queue(const vg::Tensor& tensor, double microseconds,
                                                                 double factor) {
  auto work = std::make_unique<SimulatedWork>(tensor, device_.index);
  vg::cuda::Event ready(device_.index);
  ready.record();
  const vg::cuda::StreamGuard guard(stream_);
  ready.wait();
  queue_reduction(tensor, static_cast<float>(factor), microseconds, simulation_.blocks, stream_);
  work->over.record();
  return work;
}

std::unique_ptr<vg::parallel::Work> SimulatedCommunicator::all_reduce_async(const vg::Tensor& tensor,
                                                                            vg::parallel::ReduceOp op) {
  const double n = size();
  const double factor = op == vg::parallel::ReduceOp::sum ? n : 1;
  if (tensor.device().is_cpu()) {
    const vg::NoGradGuard no_grad;
    tensor.detach().mul_(factor);
    return std::make_unique<Done>();
  }
  const double transfer = 2 * (n - 1) / n * bytes_of(tensor) / simulation_.bandwidth * 1e-3;
  return queue(tensor, latency_us() + transfer, factor);
}

void SimulatedCommunicator::broadcast(const vg::Tensor& tensor, int) {
  if (tensor.device().is_cpu()) return;
  queue(tensor, latency_us() / 2 + bytes_of(tensor) / simulation_.bandwidth * 1e-3, 1)->wait();
}

std::unique_ptr<vg::parallel::Work> SimulatedCommunicator::send_receive_async(
    const std::vector<vg::parallel::Message>& sends, const std::vector<vg::parallel::Message>& receives) {
  const vg::NoGradGuard no_grad;
  double sent = 0, received = 0;
  for (const auto& [tensor, peer] : sends) sent += bytes_of(tensor);
  for (const auto& [tensor, peer] : receives) {
    received += bytes_of(tensor);
    tensor.detach().zero_();
  }
  if (sends.empty() && receives.empty()) return std::make_unique<Done>();
  const double transfer = std::max(sent, received) / simulation_.bandwidth * 1e-3;
  return queue((receives.empty() ? sends : receives)[0].tensor, simulation_.latency_us + transfer, 1);
}

vg::Tensor SimulatedCommunicator::all_gather(const vg::Tensor& tensor) {
  const vg::NoGradGuard no_grad;
  vg::Shape shape{size()};
  for (const int64_t length : tensor.shape()) shape.push_back(length);
  return tensor.detach().unsqueeze(0).expand(shape).contiguous();
}

vg::Tensor SimulatedCommunicator::reduce_scatter(const vg::Tensor& tensor, vg::parallel::ReduceOp op) {
  const vg::NoGradGuard no_grad;
  return tensor.detach().select(0, 0) * (op == vg::parallel::ReduceOp::sum ? size() : 1);
}

}  // namespace scaling
