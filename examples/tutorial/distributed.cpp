// The code of docs/distributed.md.
#include <voxgrad.h>

#include <iostream>
#include <memory>

namespace vg = voxgrad;

struct Model : vg::nn::Module {
  vg::nn::Conv3d first{1, 8, 3, 1, 1};
  vg::nn::GroupNorm norm{2, 8};
  vg::nn::Conv3d last{8, 3, 1};
  VG_MODULE(first, norm, last)
  vg::Tensor forward(const vg::Tensor& x) { return last(vg::relu(norm(first(x)))); }
};

namespace {

constexpr int64_t kBatch = 8;  // samples per step, summed over all ranks

vg::data::Sample random_sample(int64_t, vg::Generator& random) {
  const vg::Tensor volume = vg::rand({1, 8, 8, 8}, {}, &random);
  return {volume, (volume.select(0, 0) * 3).to(vg::i64)};
}

void train(vg::distributed::Communicator& world) {
  Model model;
  model.to(world.device());
  vg::nn::DataParallel parallel(model, world);  // copies rank 0's parameters to all ranks
  vg::optim::SGD optimizer(model.parameters(), {.lr = 0.1});

  const vg::data::FunctionDataset dataset(32, random_sample);
  const auto order = std::make_shared<vg::data::RandomSampler>(dataset.size());
  const auto part = std::make_shared<vg::data::DistributedSampler>(
      order, vg::data::DistributedSamplerOptions{world.size(), world.rank(), kBatch});
  vg::data::Loader loader(dataset, {.batch_size = kBatch / world.size(), .device = world.device(), .sampler = part});
  for (const auto& [x, y] : loader) {  // this rank's part of each batch
    const vg::Tensor loss = vg::dice_ce_loss(model(x), y);
    optimizer.zero_grad();
    loss.backward();  // averages the gradients over the ranks
    optimizer.step();
  }
}

void train_on_one_volume(vg::distributed::Communicator& world) {
  Model model;
  model.to(world.device());
  const vg::Tensor volume = vg::rand({1, 1, 16, 8, 8}, {.device = world.device()});
  const vg::Tensor labels = (volume.select(1, 0) * 3).to(vg::i64);

  vg::nn::DataParallel parallel(model, world);
  {
    const vg::distributed::SpatialParallel spatial(world);
    const vg::Tensor loss = vg::dice_ce_loss(model(spatial.slab(volume)), spatial.slab(labels));
    loss.backward();
  }
}

}  // namespace

int main() {
  vg::distributed::set_environment();  // before the first use of a GPU
  const bool use_gpus = vg::distributed::nccl_available() && vg::cuda::is_available();
  if (!use_gpus && !vg::distributed::mpi_available()) {
    std::cout << "skipped: needs a build with NCCL and a GPU, or a build with MPI\n";
    return 0;
  }
  return vg::distributed::run(
      [](vg::distributed::Communicator& world) {
        train(world);
        train_on_one_volume(world);
      },
      use_gpus ? vg::Device::cuda() : vg::Device::cpu());
}
