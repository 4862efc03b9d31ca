// A minimal user program. It trains for one step, saves the layer and loads it again.
#include <voxgrad.h>

#include <iostream>

int main() {
  namespace vg = voxgrad;
  vg::set_num_threads(1);
  vg::nn::ConvTranspose3d layer{{.in_channels = 2, .out_channels = 3, .kernel_size = 4, .stride = 2, .padding = 1}};
  vg::optim::SGD optimizer(layer.parameters(), {.lr = 0.1});
  const vg::Tensor loss = vg::mse_loss(layer(vg::randn({1, 2, 4, 4, 4})), vg::zeros({1, 3, 8, 8, 8}));
  loss.backward();
  optimizer.step();
  vg::save_safetensors("layer.safetensors", layer.state_dict());
  layer.load_state_dict(vg::load_safetensors("layer.safetensors"));
  std::cout << "voxgrad " << VOXGRAD_VERSION << ", loss " << loss.item() << '\n';
}
