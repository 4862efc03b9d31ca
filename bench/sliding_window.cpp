// Sliding-window inference for compare_sliding.py. Reads volume.npy and the weights of two convolutions (first.npy,
// second.npy) from FOLDER, writes result.npy to FOLDER, and prints the seconds of each run. The volume is on the CPU.
//
//   sliding_window FOLDER WINDOW BATCH MIRROR_AXES RUNS THREADS DEVICE_OF_MODEL DEVICE_OF_RESULT PRECISION
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>

#include <voxgrad.h>

int main(int argc, char** argv) {
  namespace vg = voxgrad;
  if (argc != 10) {
    std::cerr << "usage: sliding_window FOLDER WINDOW BATCH MIRROR_AXES RUNS THREADS DEVICE_OF_MODEL "
                 "DEVICE_OF_RESULT PRECISION\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  vg::nn::SlidingWindowOptions options{.window = std::atoi(argv[2]), .batch_size = std::atoi(argv[3])};
  for (int axis = 0; axis < std::atoi(argv[4]); ++axis) options.mirror_axes.push_back(axis);
  vg::set_num_threads(std::atoi(argv[6]));
  const auto device = [&](int i) { return argv[i] == std::string("cuda") ? vg::Device::cuda() : vg::Device::cpu(); };
  options.device = device(7);
  options.accumulate = device(8);
  if (argv[9] == std::string("bf16")) options.precision = vg::bf16;
  try {
    const vg::Tensor volume = vg::load_npy(folder / "volume.npy"),
                     first = vg::load_npy(folder / "first.npy").to(*options.device),
                     second = vg::load_npy(folder / "second.npy").to(*options.device);
    const auto model = [&](const vg::Tensor& x) {
      if (first.size(0) == 0) return vg::relu(x);  // --channels 0 of compare_sliding.py
      return vg::conv3d(vg::relu(vg::conv3d(x, first, {}, {.padding = 1})), second, {}, {.padding = 1});
    };
    for (int run = 0; run < std::atoi(argv[5]); ++run) {
      const auto start = std::chrono::steady_clock::now();
      const vg::Tensor result = vg::nn::sliding_window_inference(volume, model, options);
      vg::synchronize(options.accumulate.value());
      std::cout << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() << std::endl;
      vg::save_npy(folder / "result.npy", result);
    }
  } catch (const vg::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
