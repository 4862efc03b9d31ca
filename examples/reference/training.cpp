// Code examples of the API reference: modules, layers, optimizers, data and tools.
// docs/site/reference.py shows the code between "// [NAME]" and "// [end]" beside the
// declaration of NAME.
#include <voxgrad.h>

#include <cmath>
#include <iostream>

namespace vg = voxgrad;

// [nn::Module]
/// A residual block.
struct Block : vg::nn::Module {
  explicit Block(int64_t channels)
      : first(channels, channels, 3, 1, 1),
        norm(4, channels),
        last(channels, channels, 3, 1, 1) {}

  vg::nn::Conv3d first;
  vg::nn::GroupNorm norm;
  vg::nn::Conv3d last;
  VG_MODULE(first, norm, last)  // parameter names: "first.weight", "first.bias", ...

  vg::Tensor forward(const vg::Tensor& x) { return x + last(vg::relu(norm(first(x)))); }
};
// [end]

namespace {

/// Throws unless a result is correct.
void expect(bool correct, const char* what) {
  vg::check(correct, "reference", "wrong result: ", what);
}

void use_layers() {
  const vg::Tensor x = vg::randn({2, 8, 8, 8, 8});
  Block block(8);
  expect(block(x).shape() == x.shape() && block.named_parameters().size() == 6, "Module");

  // [nn::Conv3d]
  const vg::nn::Conv3d conv{
      {.in_channels = 8, .out_channels = 16, .kernel_size = 3, .padding = "same"}};
  // Channels, kernel size, stride and padding in PyTorch's order:
  const vg::nn::Conv3d strided(8, 16, 3, 2, 1);
  // Different sizes along D, H and W:
  const vg::nn::Conv3d in_plane{
      {.in_channels = 8, .out_channels = 8, .kernel_size = {1, 3, 3}, .padding = {0, 1, 1}}};
  std::cout << conv(x).shape() << '\n';     // [2, 16, 8, 8, 8]
  std::cout << strided(x).shape() << '\n';  // [2, 16, 4, 4, 4]
  // [end]
  expect(strided(x).size(2) == 4 && in_plane(x).shape() == x.shape(), "Conv3d");

  // [nn::ConvTranspose3d]
  const vg::nn::ConvTranspose3d up{
      {.in_channels = 8, .out_channels = 4, .kernel_size = 2, .stride = 2}};
  std::cout << up(x).shape() << '\n';  // [2, 4, 16, 16, 16]
  // [end]
  expect(up(x).size(4) == 16, "ConvTranspose3d");

  // [nn::BatchNorm3d]
  vg::nn::BatchNorm3d norm(8);
  const vg::Tensor in_training = norm(x);  // statistics of the batch; updates the buffers
  norm.eval();
  const vg::Tensor in_evaluation = norm(x);  // running statistics
  // [end]
  expect(std::abs(in_training.mean().item()) < 1e-5 && in_evaluation.shape() == x.shape(),
         "BatchNorm3d");

  // [nn::Linear]
  const vg::nn::Linear linear(64, 10);
  const vg::Tensor scores = linear(vg::randn({2, 64}));  // (2, 10)
  // [end]
  expect(scores.size(1) == 10, "Linear");

  // [nn::Sequential]
  vg::nn::Sequential network{vg::nn::Conv3d(8, 16, 3, 1, 1), vg::nn::GroupNorm(4, 16),
                             vg::nn::ReLU{}, vg::nn::Conv3d(16, 2, 1)};
  std::cout << network << '\n';  // prints the modules and the shapes of their parameters
  // [end]
  expect(network(x).size(1) == 2, "Sequential");
}

void train() {
  // [nn::UNet]
  vg::nn::UNet model{
      {.in_channels = 1,
       .num_classes = 3,
       .stages = {
           {.features = 8}, {.features = 16, .stride = 2}, {.features = 32, .stride = 2}}}};
  const vg::Tensor logits = model(vg::randn({1, 1, 16, 16, 16}));  // (1, 3, 16, 16, 16)
  // [end]
  expect(logits.size(1) == 3, "UNet");

  // [data::FunctionDataset]
  const vg::data::FunctionDataset dataset(8, [](int64_t, vg::Generator& random) {
    const vg::Tensor volume = vg::rand({1, 16, 16, 16}, {}, &random);  // no batch axis
    return vg::data::Sample{volume, (volume[0] * 3).to(vg::i64)};
  });
  // [end]
  // [data::Loader]
  vg::data::Loader loader(dataset, {.batch_size = 2, .shuffle = true, .num_workers = 2});
  for (const auto& [image, label] : loader) {  // one epoch
    std::cout << image.shape() << ' ' << label.shape() << '\n';
    // [2, 1, 16, 16, 16] [2, 16, 16, 16]
  }
  // [end]

  const vg::Tensor x = vg::rand({2, 1, 16, 16, 16});
  const vg::Tensor y = (x.select(1, 0) * 3).to(vg::i64);
  // [optim::AdamW]
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 1e-2});
  const vg::Tensor loss = vg::dice_ce_loss(model(x), y);
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
  // [end]
  // [optim::SGD]
  vg::optim::SGD sgd(model.parameters(),
                     {.lr = 1e-2, .momentum = 0.99, .weight_decay = 3e-5, .nesterov = true});
  // [end]
  // [optim::CosineAnnealingLR]
  vg::optim::CosineAnnealingLR schedule(sgd, {.t_max = 1000, .warmup_steps = 50});
  for (int step = 0; step < 3; ++step) {
    sgd.step();
    schedule.step();  // after each step of the optimizer
  }
  // [end]
  // [optim::clip_grad_norm_]
  const vg::Tensor norm =
      vg::optim::clip_grad_norm_(model.parameters(), 12);  // the norm before clipping
  // [end]
  expect(norm.item() > 0, "clip_grad_norm_");

  // [autocast]
  {
    const vg::autocast guard(vg::bf16);  // convolutions and matrix products in bf16
    vg::dice_ce_loss(model(x), y).backward();
  }
  // [end]

  // [optim::ExponentialMovingAverage]
  vg::optim::ExponentialMovingAverage average(model, {.decay = 0.99});
  average.update();  // after each step of the optimizer
  {
    // The model uses the averages until the end of the block.
    const auto swapped = average.swap();
    std::cout << vg::dice_ce_loss(model(x), y).item() << '\n';
  }
  // [end]

  int64_t step = 3;
  // [save_checkpoint]
  const vg::CheckpointParts parts{.model = &model,
                                  .optimizer = &sgd,
                                  .schedule = &schedule,
                                  .loader = &loader,
                                  .step = &step};
  vg::save_checkpoint("checkpoint.safetensors", parts);
  // [end]
  // [load_checkpoint]
  step = 0;
  vg::load_checkpoint("checkpoint.safetensors", parts);  // all parts continue from there
  // [end]
  expect(step == 3, "load_checkpoint");

  // [nn::sliding_window_inference]
  model.eval();
  const vg::Tensor volume = vg::rand({1, 1, 24, 40, 24});
  const vg::Tensor predicted = vg::nn::sliding_window_inference(
      volume, [&](const vg::Tensor& windows) { return model(windows); },
      {.window = vg::Triple(16), .overlap = 0.5});
  const vg::Tensor classes = predicted.argmax(1);  // (1, 24, 40, 24)
  // [end]
  expect(classes.size(2) == 40, "sliding_window_inference");

  // [profiler::Session]
  vg::profiler::Session session;
  model(x);
  session.stop();
  std::cout << session.table();      // operators, sorted by time
  session.save_trace("trace.json");  // for ui.perfetto.dev
  // [end]
  expect(!session.events().empty(), "Session");
}

}  // namespace

int main() {
  vg::manual_seed(0);
  use_layers();
  train();
}
