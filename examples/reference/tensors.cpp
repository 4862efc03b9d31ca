// Code examples of the API reference: tensors, files and gradients. docs/site/reference.py
// shows the code between "// [NAME]" and "// [end]" beside the declaration of NAME.
#include <voxgrad.h>

#include <iostream>
#include <vector>

namespace vg = voxgrad;

namespace {

/// Throws unless a result is correct.
void expect(bool correct, const char* what) {
  vg::check(correct, "reference", "wrong result: ", what);
}

void create() {
  // [tensor]
  const vg::Tensor matrix = vg::tensor({{1, 2}, {3, 4}});               // (2, 2), f32
  const vg::Tensor labels = vg::tensor({0, 2, 1}, {.dtype = vg::i64});  // (3), i64
  const vg::Tensor copied = vg::tensor(std::vector<double>{0.5, 1.5});  // (2), f64
  std::cout << matrix << '\n' << labels << '\n' << copied << '\n';
  // [end]
  expect(matrix.at({1, 0}) == 3 && labels.dtype() == vg::i64 && copied.dtype() == vg::f64,
         "tensor");

  // [zeros]
  const vg::Tensor volume = vg::zeros({2, 1, 16, 32, 32});  // (N, C, D, H, W), f32, on the CPU
  const vg::Tensor mask = vg::full({16, 32, 32}, 1, {.dtype = vg::u8});
  const vg::Tensor same = vg::ones_like(volume);  // same shape, dtype, device and layout
  // [end]
  expect(same.sum().item() == volume.numel() && mask.dtype() == vg::u8, "zeros");

  // [randn]
  vg::manual_seed(0);
  const vg::Tensor noise = vg::randn({2, 1, 16, 32, 32});
  vg::Generator generator(7);
  const vg::Tensor own =
      vg::randn({4}, {.dtype = vg::f64}, &generator);  // does not change the default generator
  // [end]
  expect(noise.numel() == 32768 && own.dtype() == vg::f64, "randn");
}

void use_tensors() {
  // [Tensor]
  vg::Tensor x = vg::arange(0, 24).reshape({2, 3, 4});
  std::cout << x.shape() << ' ' << x.dtype() << ' ' << x.device() << '\n';  // [2, 3, 4] f32 cpu
  const vg::Tensor row = x[1][2];                                           // (4), a view
  row.fill_(0);                                                             // writes into x
  x += 1;
  std::cout << x.mean({1, 2}) << '\n';  // the mean over the last two axes
  // [end]
  expect(x.at({1, 2, 3}) == 1 && x.at({0, 0, 1}) == 2, "Tensor");

  // [Tensor::to]
  const vg::Device device = vg::cuda::is_available() ? vg::Device::cuda() : vg::Device::cpu();
  const vg::Tensor on_device = x.to(device);
  const vg::Tensor half = x.to(device, vg::f16);
  const vg::Tensor back = half.to(vg::Device::cpu(), vg::f32);
  // [end]
  expect(on_device.device() == device && back.at({0, 0, 1}) == 2, "to");

  // [Tensor::item]
  const double sum = vg::ones({2, 3}).sum().item();
  const auto count = vg::ones({2, 3}).sum().item<int64_t>();
  // [end]
  expect(sum == 6 && count == 6, "item");
}

void differentiate() {
  // [Tensor::backward]
  const vg::Tensor w = vg::tensor({1, 2}, {.requires_grad = true});
  const vg::Tensor loss = (w * w).sum();
  loss.backward();
  std::cout << w.grad() << '\n';  // 2 w
  // [end]
  expect(w.grad().at({1}) == 4, "backward");

  // [autograd::grad]
  const vg::Tensor x = vg::tensor({3.0}, {.requires_grad = true});
  const vg::Tensor y = vg::pow(x, 3).sum();
  const vg::Tensor first =
      vg::autograd::grad({y}, {x}, {}, true, true)[0];  // 3 x^2, keeps the graph
  const vg::Tensor second = vg::autograd::grad({first.sum()}, {x})[0];  // 6 x
  // [end]
  expect(first.at({0}) == 27 && second.at({0}) == 18, "grad");

  // [NoGradGuard]
  {
    const vg::NoGradGuard no_grad;
    w.add_(w.grad(), -0.1);  // a step of gradient descent
  }
  // [end]
  expect(w.requires_grad() && w.at({1}) < 2, "NoGradGuard");

  // [custom_function]
  const auto clipped_exp = [](const vg::Tensor& input) {
    const vg::Saved saved(input);
    return vg::custom_function(
        "clipped_exp", {input},
        [](const vg::Tensors& in) { return vg::Tensors{vg::exp(vg::clamp_max(in[0], 10))}; },
        [saved](const vg::Tensors& grads) {
          const vg::Tensor& in = saved();
          return vg::Tensors{grads[0] * vg::exp(vg::clamp_max(in, 10)) *
                             (in < 10).to(in.dtype())};
        })[0];
  };
  // [end]

  // [gradcheck]
  const vg::Tensor point = vg::randn({3, 4}, {.dtype = vg::f64, .requires_grad = true});
  const vg::GradcheckReport report = vg::gradcheck(
      [&](const vg::Tensors& in) { return vg::Tensors{clipped_exp(in[0])}; }, {point});
  vg::check(report.passed, "example", report.message);
  // [end]

  // [autograd::recompute]
  const vg::Tensor input = vg::randn({8, 64}, {.requires_grad = true});
  const auto block = [](const vg::Tensors& in) {
    return vg::Tensors{vg::gelu(vg::exp(in[0]))};
  };
  const vg::Tensor output =
      vg::autograd::recompute(block, {input})[0];  // does not keep the result of exp
  output.sum().backward();
  // [end]
  expect(input.grad().defined(), "recompute");
}

void read_and_write_files() {
  const vg::Tensor weight = vg::randn({8, 1, 3, 3, 3});
  // [save_safetensors]
  vg::save_safetensors("weights.safetensors", {{"conv.weight", weight}}, {{"epoch", "12"}});
  // [end]
  // [load_safetensors]
  vg::Metadata metadata;
  const vg::TensorMap tensors =
      vg::load_safetensors("weights.safetensors", vg::Device::cpu(), &metadata);
  std::cout << tensors.at("conv.weight").shape() << ", epoch " << metadata.at("epoch") << '\n';
  // [end]
  expect(tensors.at("conv.weight").numel() == weight.numel(), "safetensors");

  // [save_nifti]
  vg::NiftiImage scan;
  scan.data = vg::zeros({16, 32, 32});
  scan.spacing = {2, 1, 1};  // D, H, W in mm
  scan.affine = {{{1, 0, 0, -16}, {0, 1, 0, -16}, {0, 0, 2, -16}, {0, 0, 0, 1}}};
  vg::save_nifti("scan.nii.gz", scan);
  // [end]
  // [load_nifti]
  const vg::NiftiImage image = vg::load_nifti("scan.nii.gz");
  const vg::Tensor batch =
      image.data.reshape({1, 1, 16, 32, 32});  // from (D, H, W) to (N, C, D, H, W)
  std::cout << image.data.shape() << ", a slice every " << image.spacing[0] << " mm\n";
  // [end]
  expect(batch.dim() == 5 && image.spacing[0] == 2, "nifti");

  // [load_npy]
  vg::save_npy("volume.npy", vg::arange(0, 4096).reshape({16, 16, 16}));
  const vg::Tensor volume = vg::load_npy("volume.npy");
  const vg::Tensor part =
      vg::NpyFile("volume.npy").read({8, 0, 0}, {2, 16, 16});  // reads two slices only
  // [end]
  expect(volume.at({8, 0, 0}) == part.at({0, 0, 0}), "npy");
}

}  // namespace

int main() {
  create();
  use_tensors();
  differentiate();
  read_and_write_files();
}
