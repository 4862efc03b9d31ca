// Step 4 of docs/tutorial.md: a dataset, a training loop, checkpoints.
#include <voxgrad.h>

#include <filesystem>
#include <iostream>

namespace vg = voxgrad;

/// Noisy balls of random radius. The network learns to remove the noise.
class Balls : public vg::data::Dataset {
 public:
  int64_t size() const override { return 32; }
  vg::data::Sample get(int64_t, vg::Generator& random) const override {
    const vg::Tensor axis = vg::linspace(-1, 1, 16);
    const vg::Tensor square = axis * axis;
    const vg::Tensor r2 = square + square.reshape({16, 1}) + square.reshape({16, 1, 1});
    const double radius = 0.3 + 0.5 * vg::rand({1}, {}, &random).item();
    const vg::Tensor clean = (r2 < radius * radius).to(vg::f32).reshape({1, 16, 16, 16});
    return {clean + 0.5 * vg::randn(clean.shape(), {}, &random), clean};
  }
};

struct Denoiser : vg::nn::Module {
  vg::nn::Conv3d first{1, 8, 3, 1, 1};
  vg::nn::GroupNorm norm{4, 8};
  vg::nn::Conv3d last{8, 1, 3, 1, 1};
  VG_MODULE(first, norm, last)
  vg::Tensor forward(const vg::Tensor& x) { return last(vg::relu(norm(first(x)))); }
};

namespace {

/// Trains until `steps` steps are done. Continues from the checkpoint if the file exists. Returns the last loss.
double train(const std::filesystem::path& path, int64_t steps) {
  vg::manual_seed(0);
  const Balls dataset;
  vg::data::Loader loader(dataset, {.batch_size = 4, .shuffle = true, .num_workers = 2});
  Denoiser model;
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  vg::optim::CosineAnnealingLR schedule(optimizer, {.t_max = 24});

  int64_t step = 0;
  const vg::CheckpointParts parts{
      .model = &model, .optimizer = &optimizer, .schedule = &schedule, .loader = &loader, .step = &step};
  if (std::filesystem::exists(path)) vg::load_checkpoint(path, parts);

  double last_loss = 0;
  while (step < steps) {
    for (const auto& [noisy, clean] : loader) {  // one epoch: 8 batches
      const vg::Tensor loss = vg::mse_loss(model(noisy), clean);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      schedule.step();
      last_loss = loss.item();
      if (++step == steps) break;
    }
    vg::save_checkpoint(path, parts);
    std::cout << "step " << step << "  loss " << last_loss << '\n';
  }
  return last_loss;
}

}  // namespace

int main() {
  std::filesystem::remove("whole.safetensors");
  std::filesystem::remove("parts.safetensors");
  const double whole = train("whole.safetensors", 20);
  train("parts.safetensors", 12);                         // stops in the middle of the second epoch
  const double resumed = train("parts.safetensors", 20);  // continues with the same batches
  vg::check(whole == resumed, "tutorial", "the loss of the resumed run is ", resumed, ", expected ", whole);
}
