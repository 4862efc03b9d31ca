// Step 1 of docs/tutorial.md: tensors.
#include <voxgrad.h>

#include <iostream>
#include <vector>

namespace vg = voxgrad;

namespace {

void create_tensors() {
  vg::manual_seed(0);
  const vg::Tensor volume = vg::randn({2, 1, 8, 16, 16});   // two samples with one channel each: (N, C, D, H, W)
  const vg::Tensor weights = vg::tensor({{1, 2}, {3, 4}});  // f32
  const vg::Tensor labels = vg::zeros({2, 8, 16, 16}, {.dtype = vg::i64});
  const std::vector<float> values(6, 0.5f);
  const vg::Tensor copied = vg::from_span<float>(values, {2, 3});

  std::cout << volume.shape() << ' ' << volume.dtype() << " on " << volume.device() << '\n';
  std::cout << weights << '\n';
  vg::check(labels.dtype() == vg::i64 && copied.numel() == 6, "tutorial", "unexpected tensors");
}

void compute_with_tensors() {
  const vg::Tensor volume = vg::randn({2, 1, 8, 16, 16});
  const vg::Tensor mean = volume.mean({2, 3, 4}, true);  // (2, 1, 1, 1, 1)
  const vg::Tensor deviation = volume.std({2, 3, 4}, 1, true);
  const vg::Tensor normalized = (volume - mean) / deviation;  // the size-1 axes are broadcast
  const vg::Tensor bright = normalized > 1.0;                 // bool
  std::cout << "fraction of bright voxels: " << bright.to(vg::f32).mean().item() << '\n';
}

void share_memory() {
  const vg::Tensor volume = vg::zeros({4, 8, 8});
  const vg::Tensor slice = volume[1];        // a view: it shares the memory of volume
  slice.fill_(2);                            // writes 64 elements of volume
  volume[2].copy_(slice);                    // `volume[2] = slice` does not compile
  const vg::Tensor copy = volume.clone();    // new memory
  copy.zero_();                              // leaves volume unchanged
  std::cout << volume.sum().item() << '\n';  // 256
  vg::check(volume.sum().item() == 256, "tutorial", "a view did not write into its volume");
}

void save_and_load() {
  const vg::Tensor volume = vg::randn({1, 1, 8, 8, 8});
  vg::save_safetensors("volume.safetensors", {{"volume", volume}}, {{"spacing", "1.0"}});
  vg::Metadata metadata;
  const vg::TensorMap loaded = vg::load_safetensors("volume.safetensors", vg::Device::cpu(), &metadata);
  std::cout << loaded.at("volume").shape() << ", spacing " << metadata.at("spacing") << '\n';
}

}  // namespace

int main() {
  create_tensors();
  compute_with_tensors();
  share_memory();
  save_and_load();
}
