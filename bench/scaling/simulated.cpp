// Implements the simulation of many ranks on one GPU.
#include "bench/scaling/simulated.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "bench/scaling/kernels.h"
#include "core/autograd.h"
#include "ops/create.h"
#include "ops/shape.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

/// A simulated collective. wait() makes the current stream wait for the collective; the host does not wait. test()
/// always returns false.
class SimulatedWork final : public vg::distributed::Work {
 public:
  SimulatedWork(const vg::Tensor& tensor, int device) : done(device), tensor_(tensor) {}
  ~SimulatedWork() override { SimulatedWork::wait(); }
  SimulatedWork(const SimulatedWork&) = delete;
  SimulatedWork& operator=(const SimulatedWork&) = delete;
  bool test() override { return false; }
  void wait() override {
    if (!std::exchange(waited_, true)) done.wait();
  }

  vg::cuda::Event done;

 private:
  vg::Tensor tensor_;
  bool waited_ = false;
};

double bytes_of(const vg::Tensor& tensor) {
  return static_cast<double>(tensor.numel() * vg::item_size(tensor.dtype()));
}

}  // namespace

SimulatedCommunicator::SimulatedCommunicator(vg::Device device, const Simulation& simulation)
    : Communicator(0, simulation.ranks, 0, device), simulation_(simulation), stream_(device.index) {
  vg::check(simulation.ranks > 1, "simulate", "needs at least two ranks, got ", simulation.ranks);
}

double SimulatedCommunicator::latency_us() const {
  const auto ranks = static_cast<unsigned>(simulation_.ranks);
  const double steps = simulation_.algorithm == "ring" ? ranks - 1 : std::bit_width(ranks - 1);
  return 2 * steps * simulation_.latency_us;
}

std::unique_ptr<vg::distributed::Work> SimulatedCommunicator::queue(const vg::Tensor& tensor, double microseconds,
                                                                    double factor) {
  auto work = std::make_unique<SimulatedWork>(tensor, device().index);
  vg::cuda::Event ready(device().index);
  ready.record();
  const vg::cuda::StreamGuard guard(stream_);
  ready.wait();
  queue_reduction(tensor, static_cast<float>(factor), microseconds, simulation_.blocks, stream_);
  work->done.record();
  return work;
}

std::unique_ptr<vg::distributed::Work> SimulatedCommunicator::start(const vg::distributed::Collective& c) {
  using enum vg::distributed::Collective::Kind;
  const vg::NoGradGuard no_grad;
  const double n = size(), us_of_byte = 1e-3 / simulation_.bandwidth;
  const double sum = c.op == vg::ReduceOp::sum ? n : 1;
  switch (c.kind) {
    case all_reduce:
      return queue(c.in, latency_us() + 2 * (n - 1) / n * bytes_of(c.in) * us_of_byte, sum);
    case broadcast:
      return queue(c.in, latency_us() / 2 + bytes_of(c.in) * us_of_byte, 1);
    case all_gather:
      c.out.copy_(c.in.unsqueeze(0).expand(c.out.shape()));
      return queue(c.out, latency_us() / 2 + bytes_of(c.out) * us_of_byte, 1);
    default:
      break;
  }
  double sent = 0, received = 0;
  for (const auto& [tensor, peer] : c.sends) sent += bytes_of(tensor);
  for (const auto& [tensor, peer] : c.receives) {
    received += bytes_of(tensor);
    tensor.detach().zero_();
  }
  const vg::Tensor any = c.tensors().empty() ? vg::zeros({1}, {.device = device()}) : c.tensors()[0];
  return queue(any, simulation_.latency_us + std::max(sent, received) * us_of_byte, 1);
}

}  // namespace scaling
