// The program that launch_test.cpp starts on several ranks. It trains a small model and can fail on purpose.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <thread>

#include "nn/checkpoint.h"
#include "nn/conv_layers.h"
#include "nn/distributed/data_parallel.h"
#include "nn/distributed/run.h"
#include "nn/layers.h"
#include "nn/norm_layers.h"
#include "nn/optim/optimizers.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/spatial.h"

namespace vg = voxgrad;

namespace {

constexpr int64_t kSamples = 60;
constexpr int64_t kBatch = 8;  // samples per step, summed over all ranks; an epoch has 8 steps

struct Model : vg::nn::Module {
  vg::nn::Conv3d first;
  vg::nn::GroupNorm norm;
  vg::nn::Conv3d last;
  VG_MODULE(first, norm, last)

  explicit Model(int64_t channels)
      : first({.in_channels = 1, .out_channels = channels, .kernel_size = 3, .padding = 1}),
        norm(2, channels),
        last({.in_channels = channels, .out_channels = 1, .kernel_size = 3, .padding = 1}) {}
  vg::Tensor forward(const vg::Tensor& x) { return last(vg::relu(norm(first(x)))); }
};

/// Command-line options of the form name=value.
struct Options {
  std::map<std::string, std::string> given;
  std::string text(const std::string& name, const std::string& fallback = "") const {
    const auto found = given.find(name);
    return found == given.end() ? fallback : found->second;
  }
  int64_t number(const std::string& name, int64_t fallback) const {
    return std::stoll(text(name, std::to_string(fallback)));
  }
};

/// Causes the failure that the option `fail` selects, in step `at` (default 3). Most failures occur only on rank `rank`
/// (default 1).
void fail_on_demand(const Options& options, vg::distributed::Communicator& world, int64_t step) {
  const std::string how = options.text("fail");
  if (how.empty() || step != options.number("at", 3)) return;
  if (how == "slab") {  // the slab of rank 1 has a different depth
    const vg::distributed::SpatialParallel spatial(world);
    const vg::TensorOptions here{.device = world.device()};
    vg::conv3d(vg::ones({1, 1, world.rank() == 1 ? 5 : 4, 4, 4}, here), vg::ones({1, 1, 3, 3, 3}, here), {},
               {.padding = 1});
    return;
  }
  if (world.rank() != options.number("rank", 1)) {
    if (how == "operation" || how == "kind") world.all_reduce(vg::ones({3}, {.device = world.device()}));
    if (how == "shape") world.all_reduce(vg::ones({3}, {.device = world.device()}), vg::ReduceOp::max);
    return;
  }
  if (how == "throw") vg::fail("program", "thrown on demand");
  if (how == "kill") kill(getpid(), SIGKILL);
  if (how == "exit") std::_Exit(0);
  if (how == "hang") std::this_thread::sleep_for(std::chrono::seconds(100));
  if (how == "operation" || how == "shape" || how == "kind") {
    const vg::Tensor mine = vg::ones({how == "shape" ? 5 : 3}, {.device = world.device()});
    how == "kind" ? world.broadcast(mine, 1) : world.all_reduce(mine, vg::ReduceOp::max);
  }
}

/// Returns a random volume and a target, which is a pointwise function of the volume. The first voxel of the volume
/// encodes the index of the sample.
vg::data::Sample make_sample(int64_t index, vg::Generator&) {
  vg::Generator random(static_cast<uint64_t>(index));
  const vg::Tensor x = vg::randn({1, 6, 6, 6}, {}, &random);
  x.set({0, 0, 0, 0}, static_cast<double>(index) / 64);
  return {x, vg::tanh(x * 2) + 0.5};
}

void train(const Options& options, vg::distributed::Communicator& world) {
  const int rank = world.rank(), size = world.size();
  world.set_timeout(static_cast<double>(options.number("timeout", 60)));
  vg::manual_seed(static_cast<uint64_t>(rank));
  Model model(options.text("fail") == "model" && rank == 1 ? 8 : 4);
  model.to(world.device());
  vg::nn::DataParallel parallel(model, world, {.bucket_cap_mb = 0.0005});
  vg::optim::SGD optimizer(model.parameters(), {.lr = 0.05, .momentum = 0.9});
  const vg::data::FunctionDataset dataset(kSamples, make_sample);
  vg::data::Loader loader(
      dataset, {.batch_size = kBatch / size,
                .num_workers = 1,
                .device = world.device(),
                .sampler = std::make_shared<vg::data::DistributedSampler>(
                    std::make_shared<vg::data::RandomSampler>(kSamples, 3),
                    vg::data::DistributedSamplerOptions{.num_replicas = size, .rank = rank, .batch_size = kBatch})});
  const std::string checkpoint = options.text("checkpoint");
  const vg::CheckpointParts parts{.model = &model, .optimizer = &optimizer, .loader = &loader};
  int64_t step = 0;
  if (!checkpoint.empty() && std::filesystem::exists(checkpoint))
    step = std::stoll(vg::load_checkpoint(checkpoint, parts).at("step"));

  const int64_t steps = options.number("steps", 50), every = options.number("every", 1000);
  std::vector<double> losses, samples;
  while (step < steps)
    for (const auto& [x, y] : loader) {
      fail_on_demand(options, world, step);
      const vg::Tensor loss = vg::mse_loss(model(x), y);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      const vg::Tensor total = loss.detach().clone();
      world.all_reduce(total);
      losses.push_back(total.item() / size);
      for (const double first : world.all_gather(x.select(1, 0).flatten(1).select(1, 0)).to_vector())
        samples.push_back(std::round(first * 64));
      ++step;
      if (rank == 0 && !checkpoint.empty() && (step % every == 0 || step == steps))
        vg::save_checkpoint(checkpoint, parts, {{"step", std::to_string(step)}});
      if (step == steps) break;
    }
  if (options.text("fail") == "drop") (void)world.all_reduce_async(vg::ones({1000000}, {.device = world.device()}));
  if (rank == 0 && !options.text("out").empty()) {
    vg::TensorMap results = model.state_dict();
    results["losses"] = vg::from_span<double>(losses, {std::ssize(losses)});
    results["samples"] = vg::from_span<double>(samples, {std::ssize(samples)});
    vg::save_safetensors(options.text("out"), results);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    options.given[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  const auto f = [&](vg::distributed::Communicator& world) { train(options, world); };
  if (const auto ranks = static_cast<int>(options.number("launch", 0))) return vg::distributed::launch(ranks, f);
  return vg::distributed::run(f, vg::Device::parse(options.text("device", "cpu")));
}
