// Trains six models of KernelBench, a collection of GPU benchmarks. Five models are a single ConvTranspose3d layer. In
// the sixth model, ReLU and GroupNorm follow this layer. Each training step runs a forward pass, a backward pass and an
// optimizer step. The program prints the time of each part, the loss of the first and the last step, and the peak
// memory.
//
//   kernelbench                          trains all models; on the CPU, with inputs of reduced size
//   kernelbench --size original          uses inputs of KernelBench's size
//   kernelbench --model 70 --steps 20    trains a single model
//   kernelbench --precision bf16         uses mixed precision
//   kernelbench --model 70 --profile     also prints the time of each operator
//   kernelbench --cuda-graph             captures a whole step in a CUDA graph and replays it
#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>

#include "examples/common/options.h"
#include "examples/common/profile.h"

namespace {
namespace vg = voxgrad;

struct ModelCase {
  const char* name;
  const char* description;
  vg::nn::ConvTranspose3d::Options conv;
  int64_t norm_groups;  // groups of the GroupNorm; 0: the model has neither ReLU nor GroupNorm
  vg::Shape original;   // input shape in KernelBench
  vg::Shape reduced;    // smaller input shape, the default on the CPU
};

const std::vector<ModelCase>& cases() {
  static const std::vector<ModelCase> table{
      {"58",
       "asymmetric kernel, no padding",
       {.in_channels = 32, .out_channels = 16, .kernel_size = {3, 5, 7}, .bias = false},
       0,
       {16, 32, 16, 32, 64},
       {2, 32, 8, 16, 32}},
      {"72",
       "stride, padding, output_padding and groups",
       {.in_channels = 32,
        .out_channels = 32,
        .kernel_size = {3, 5, 7},
        .stride = 2,
        .padding = {1, 2, 3},
        .output_padding = 1,
        .groups = 4,
        .bias = false},
       0,
       {8, 32, 12, 24, 48},
       {2, 32, 6, 12, 24}},
      {"73",
       "stride, padding and groups",
       {.in_channels = 32, .out_channels = 32, .kernel_size = 3, .stride = 2, .padding = 1, .groups = 4, .bias = false},
       0,
       {4, 32, 32, 64, 128},
       {1, 32, 16, 32, 64}},
      {"77",
       "padded, dilated and strided",
       {.in_channels = 32,
        .out_channels = 64,
        .kernel_size = 3,
        .stride = 2,
        .padding = 1,
        .bias = false,
        .dilation = 2},
       0,
       {16, 32, 16, 32, 32},
       {2, 32, 8, 16, 16}},
      {"70",
       "48 to 24 channels",
       {.in_channels = 48, .out_channels = 24, .kernel_size = 3, .bias = false},
       0,
       {8, 48, 96, 96, 96},
       {1, 48, 32, 32, 32}},
      {"61",
       "ConvTranspose3d, ReLU, GroupNorm: 64 to 128 channels",
       {.in_channels = 64, .out_channels = 128, .kernel_size = 3, .bias = false},
       8,
       {16, 64, 32, 32, 32},
       {1, 64, 16, 16, 16}},
  };
  return table;
}

struct Options {
  std::string model = "all", size = "auto", device = "auto", dtype = "f32", precision = "highest", tensorboard, profile;
  int steps = 5;
  bool cuda_graph = false;
};

int parse(int argc, char** argv, Options& options) {
  CLI::App app{"Trains KernelBench's ConvTranspose3d models with voxgrad"};
  std::vector<std::string> names{"all"};
  for (const ModelCase& c : cases()) names.push_back(c.name);
  app.add_option("--model", options.model, "number of the model, or all")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--size", options.size,
                 "input size: original, reduced, or auto (original on a GPU, reduced on the CPU)")
      ->check(CLI::IsMember({"auto", "original", "reduced"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")
      ->check(examples::device_name())
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "element type")->check(CLI::IsMember({"f32", "f64"}))->capture_default_str();
  examples::Precision::add_option(app, options.precision);
  app.add_option("--steps", options.steps, "number of timed steps, which follow one untimed step")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  examples::add_tensorboard_option(app, options.tensorboard);
  app.add_flag("--cuda-graph", options.cuda_graph, "capture a step in a CUDA graph and time replays (needs a GPU)");
  examples::StepProfiler::add_option(app, options.profile);
  try {
    app.parse(argc, argv);
    if (options.dtype == "f64" && examples::Precision(options.precision).half())
      throw CLI::ValidationError("--precision " + options.precision + " needs --dtype f32");
    if (!options.profile.empty() && options.model == "all") throw CLI::ValidationError("--profile needs one --model");
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return -1;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Trains a model and prints a row of the table. If `writer` is not null, writes the loss and the times of each step to
/// TensorBoard.
void train(const ModelCase& c, const Options& options, vg::Device device, bool original, vg::SummaryWriter* writer) {
  const vg::DType dtype = options.dtype == "f64" ? vg::f64 : vg::f32;
  vg::manual_seed(0);
  vg::nn::Sequential model;
  model.push_back(vg::nn::ConvTranspose3d{c.conv});
  if (c.norm_groups > 0) {
    model.push_back(vg::nn::ReLU{});
    model.push_back(vg::nn::GroupNorm{c.norm_groups, c.conv.out_channels});
  }
  model.to(device);
  model.to(dtype);
  vg::optim::SGD optimizer(model.parameters(), {.lr = 0.1, .momentum = 0.9});

  // The input requires a gradient, as the input of a layer inside a larger model does.
  const vg::Tensor x = vg::randn(original ? c.original : c.reduced, {dtype, device, /*requires_grad=*/true});
  vg::Shape shape;
  {
    vg::NoGradGuard no_grad;
    shape = model(x).shape();
  }
  const vg::Tensor target = vg::randn(shape, {dtype, device});
  vg::memory::reset_peak(device);

  // Milliseconds of the forward pass, the backward pass and the optimizer step. With a CUDA graph, "step" is a replay
  // of the whole step.
  constexpr std::array<const char*, 3> kParts{"forward", "backward", "step"};
  std::array<std::vector<double>, 3> times;
  double first = 0, last = 0;
  const auto timed = [&](bool record, size_t part, const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    vg::synchronize(device);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    if (record) times[part].push_back(time.count());
  };
  vg::Tensor loss;
  const examples::Precision precision(options.precision);
  vg::optim::GradScaler scaler = precision.scaler();
  const auto forward = [&] {
    const vg::autocast guard = precision.autocast();
    loss = vg::mse_loss(model(x), target);
  };
  const auto backward = [&] {
    optimizer.zero_grad();
    x.set_grad({});
    scaler.scale(loss).backward();
  };
  const auto update = [&] {
    scaler.step(optimizer);
    scaler.update();
  };
  std::optional<vg::cuda::CUDAGraph> graph;
  examples::StepProfiler profiler(options.profile);
  for (int step = 0; step <= options.steps; ++step) {
    profiler.begin_step();
    if (graph) {
      timed(true, 2, [&] { graph->replay(); });
    } else {
      timed(step > 0, 0, forward);
      timed(step > 0, 1, backward);
      timed(step > 0, 2, update);
    }
    last = loss.item();
    if (step == 0) first = last;
    if (writer) writer->add_scalar(vg::concat("model ", c.name, "/loss"), last, step);
    for (size_t part = 0; writer && step > 0 && part < times.size(); ++part)
      if (!times[part].empty())
        writer->add_scalar(vg::concat("model ", c.name, "/", kParts[part], " ms"), times[part].back(), step);
    if (step > 0 || !options.cuda_graph) continue;
    graph.emplace(device.index);
    graph->capture([&] {
      forward();
      backward();
      update();
    });
  }
  const auto column = [](const std::vector<double>& part) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f", part.empty() ? 0 : median(part));
    return std::string(part.empty() ? "-" : text);
  };
  std::printf("%-5s %-21s %9s %9s %7s  %.4f > %.4f %8.1f  %s\n", c.name, vg::concat(x.shape()).c_str(),
              column(times[0]).c_str(), column(times[1]).c_str(), column(times[2]).c_str(), first, last,
              static_cast<double>(vg::memory::stats(device).peak) / (1 << 20), c.description);
  std::fflush(stdout);
  profiler.finish();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (const int code = parse(argc, argv, options); code >= 0) return code;
  try {
    const vg::Device device = examples::device_of(options.device);
    const examples::Precision precision(options.precision);
    precision.set_float32();
    const bool original = options.size == "original" || (options.size == "auto" && device.is_cuda());
    vg::check(!options.cuda_graph || device.is_cuda(), "kernelbench", "--cuda-graph needs a GPU, but the device is ",
              device);
    std::cout << (options.dtype == "f64" ? "float64" : precision.text(device)) << " on " << device << ", medians of "
              << options.steps << " steps: "
              << (options.cuda_graph ? "replays of whole steps\n" : "forward pass with loss, backward pass, SGD step\n")
              << "model input                    fwd ms    bwd ms step ms  loss           peak MiB\n";
    std::optional<vg::SummaryWriter> writer;
    if (!options.tensorboard.empty()) writer.emplace(options.tensorboard);
    for (const ModelCase& c : cases())
      if (options.model == "all" || options.model == c.name)
        train(c, options, device, original, writer ? &*writer : nullptr);
  } catch (const std::exception& error) {
    std::cerr << "kernelbench: " << error.what() << '\n';
    return 1;
  }
}
