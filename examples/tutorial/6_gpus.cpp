// Step 6 of docs/tutorial.md: mixed precision, CUDA graphs and several GPUs. On a machine without a GPU, the program
// skips the CUDA graph and runs the other parts on the CPU.
#include <voxgrad.h>

#include <iostream>
#include <memory>

namespace vg = voxgrad;

struct Network : vg::nn::Module {
  vg::nn::UNet unet{{.in_channels = 1, .num_classes = 3, .stages = {{.features = 8}, {.features = 16, .stride = 2}}}};
  VG_MODULE(unet)
  vg::Tensor forward(const vg::Tensor& x) { return unet(x); }
};

namespace {

constexpr int64_t kSize = 16;

/// Returns random class indices in {0, 1, 2}.
vg::Tensor random_labels(int64_t samples, vg::Device device) {
  return (vg::rand({samples, kSize, kSize, kSize}, {.device = device}) * 3).to(vg::i64);
}

void train_in_mixed_precision() {
  const vg::Device device = vg::cuda::is_available() ? vg::Device::cuda() : vg::Device::cpu();
  Network model;
  model.to(device);
  model.to(vg::MemoryFormat::channels_last);  // the layout of the fastest convolution kernels
  vg::optim::SGD optimizer(model.parameters(), {.lr = 1e-2, .momentum = 0.99, .nesterov = true});
  const vg::Tensor x = vg::randn({2, 1, kSize, kSize, kSize}, {.device = device});
  const vg::Tensor y = random_labels(2, device);

  for (int step = 0; step < 3; ++step) {
    vg::Tensor loss;
    {
      const vg::autocast guard(vg::bf16);  // convolutions in bf16; parameters and the loss stay f32
      loss = vg::dice_ce_loss(model(x), y);
    }
    optimizer.zero_grad();
    loss.backward();
    vg::optim::clip_grad_norm_(model.parameters(), 12);
    optimizer.step();
    std::cout << "bf16 on " << device << ": " << loss.item() << '\n';
  }
}

void train_in_f16() {
  const vg::Device device = vg::cuda::is_available() ? vg::Device::cuda() : vg::Device::cpu();
  Network model;
  model.to(device);
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 1e-3});
  vg::optim::GradScaler scaler;  // f16 needs loss scaling, bf16 does not
  const vg::Tensor x = vg::randn({2, 1, kSize, kSize, kSize}, {.device = device});
  const vg::Tensor y = random_labels(2, device);

  vg::Tensor loss;
  {
    const vg::autocast guard(vg::f16);
    loss = vg::dice_ce_loss(model(x), y);
  }
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);  // clipping needs the true gradients
  vg::optim::clip_grad_norm_(model.parameters(), 12);
  scaler.step(optimizer);  // skips the step if a gradient is not finite
  scaler.update();
  std::cout << "f16 on " << device << ": " << loss.item() << '\n';
}

void replay_a_step() {
  if (!vg::cuda::is_available()) return;
  Network model;
  model.to(vg::Device::cuda());
  vg::optim::SGD optimizer(model.parameters(), {.lr = 1e-2});
  const vg::Tensor x = vg::randn({2, 1, kSize, kSize, kSize}, {.device = vg::Device::cuda()});
  const vg::Tensor y = random_labels(2, vg::Device::cuda());
  vg::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = vg::dice_ce_loss(model(x), y);
    loss.backward();
    optimizer.step();
  };
  step();  // the first step allocates the optimizer's state

  vg::cuda::CUDAGraph graph;
  graph.capture(step);
  for (int i = 0; i < 3; ++i) {
    x.copy_(vg::randn(x.shape(), x.options()));  // a replay reads the captured tensors
    graph.replay();
    std::cout << "replayed: " << loss.item() << '\n';
  }
}

void train_rank(vg::distributed::Communicator& world) {
  vg::manual_seed(world.rank());  // each rank draws its own data
  Network model;
  model.to(world.device());
  vg::nn::DataParallel parallel(model, world);  // copies rank 0's parameters; backward() averages the gradients
  vg::optim::SGD optimizer(model.parameters(), {.lr = 1e-2});
  const vg::Tensor x = vg::randn({1, 1, kSize, kSize, kSize}, {.device = world.device()});
  const vg::Tensor loss = vg::dice_ce_loss(model(x), random_labels(1, world.device()));
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
  std::cout << "rank " << world.rank() << " of " << world.size() << ": " << loss.item() << '\n';
}

int train_on_all_devices() {
  const int gpus = vg::cuda::device_count();
  if (gpus > 0 && vg::distributed::nccl_available()) return vg::distributed::launch(gpus, train_rank);
  if (vg::distributed::mpi_available()) return vg::distributed::run(train_rank);  // mpirun -n 4 starts four ranks
  return 0;
}

}  // namespace

int main() {
  vg::distributed::set_environment();  // before the first use of a GPU
  vg::manual_seed(0);
  train_in_mixed_precision();
  train_in_f16();
  replay_a_step();
  return train_on_all_devices();
}
