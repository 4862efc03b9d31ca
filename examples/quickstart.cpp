// The program of README.md.
#include <voxgrad.h>

#include <iostream>

namespace vg = voxgrad;

/// A decoder that learns to draw a ball.
struct Decoder : vg::nn::Module {
  vg::nn::ConvTranspose3d up{{.in_channels = 8, .out_channels = 16, .kernel_size = 4, .stride = 2, .padding = 1}};
  vg::nn::GroupNorm norm{4, 16};
  vg::nn::ConvTranspose3d out{{.in_channels = 16, .out_channels = 1, .kernel_size = 4, .stride = 2, .padding = 1}};
  VG_MODULE(up, norm, out)  // parameter names: "up.weight", "norm.bias", ...

  vg::Tensor forward(const vg::Tensor& x) { return out(vg::relu(norm(up(x)))); }
};

int main() {
  const vg::Device device = vg::cuda::is_available() ? vg::Device::cuda() : vg::Device::cpu();
  vg::manual_seed(0);
  Decoder model;
  model.to(device);
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});

  const vg::Tensor code = vg::randn({1, 8, 4, 4, 4}, {.device = device});  // N, C, D, H, W
  const vg::Tensor square = vg::pow(vg::linspace(-1, 1, 16, {.device = device}), 2);
  const vg::Tensor r2 = square + square.reshape({16, 1}) + square.reshape({16, 1, 1});
  const vg::Tensor ball = (r2 < 0.5).to(vg::f32).reshape({1, 1, 16, 16, 16});

  for (int step = 0; step <= 100; ++step) {
    const vg::Tensor loss = vg::mse_loss(model(code), ball);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 20 == 0) std::cout << "step " << step << "  loss " << loss.item() << '\n';
  }
  vg::save_safetensors("decoder.safetensors", model.state_dict());
}
