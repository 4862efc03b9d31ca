// Step 3 of docs/tutorial.md: modules.
#include <voxgrad.h>

#include <iostream>
#include <vector>

namespace vg = voxgrad;

/// A residual block. It maps one tensor to one tensor, so it is a Layer.
struct Block : vg::nn::Layer {
  explicit Block(int64_t channels) : conv(channels, channels, 3, 1, 1), norm(4, channels) {}
  vg::nn::Conv3d conv;
  vg::nn::GroupNorm norm;
  VG_MODULE(conv, norm)

  vg::Tensor forward(const vg::Tensor& x) const override { return vg::relu(x + norm(conv(x))); }
};

/// Scales an image by a trained factor and adds a map. It takes two tensors, so it is a Module.
struct Merge : vg::nn::Module {
  vg::nn::Parameter factor{vg::ones({1})};  // trained
  vg::nn::Buffer calls{vg::zeros({1})};     // saved and moved with the model, but not trained
  VG_MODULE(factor, calls)

  vg::Tensor forward(const vg::Tensor& image, const vg::Tensor& map) {
    if (is_training()) calls.add_(vg::ones({1}, calls.options()));
    return factor * image + map;
  }
};

struct Network : vg::nn::Module {
  vg::nn::Conv3d first{{.in_channels = 1, .out_channels = 8, .kernel_size = 3, .padding = 1}};
  std::vector<Block> blocks;
  vg::nn::Conv3d last{8, 1, 1};
  Merge merge;
  VG_MODULE(first, blocks, last, merge)  // "first.weight", "blocks.0.conv.weight", ..., "merge.factor"

  Network() {
    for (int i = 0; i < 2; ++i) blocks.emplace_back(8);
  }
  vg::Tensor forward(const vg::Tensor& image) {
    vg::Tensor x = first(image);
    for (const Block& block : blocks) x = block(x);
    return merge(image, last(x));
  }
};

namespace {

void use_a_module() {
  Network model;
  std::cout << model << '\n';
  const vg::Tensor y = model(vg::randn({1, 1, 8, 8, 8}));
  y.sum().backward();
  for (const auto& [name, tensor] : model.named_parameters())
    std::cout << name << ' ' << tensor.shape() << ", gradient " << vg::norm(tensor.grad()).item() << '\n';

  vg::save_safetensors("network.safetensors", model.state_dict());
  Network other;
  other.load_state_dict(vg::load_safetensors("network.safetensors"));  // throws if names or shapes differ
  model.eval();
  other.eval();
  const vg::Tensor x = vg::randn({1, 1, 8, 8, 8});
  vg::check(vg::abs(model(x) - other(x)).amax().item() == 0, "tutorial",
            "the loaded network returns a different result");
}

void use_sequential() {
  const vg::nn::Sequential model{vg::nn::Conv3d(1, 8, 3, 1, 1), vg::nn::GroupNorm(4, 8), vg::nn::ReLU(), Block(8),
                                 vg::nn::Conv3d(8, 1, 1)};
  std::cout << model(vg::randn({1, 1, 8, 8, 8})).shape() << '\n';
}

}  // namespace

int main() {
  vg::manual_seed(0);
  use_a_module();
  use_sequential();
}
