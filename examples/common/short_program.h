// The main function of the short programs of docs/gallery.md, and the headers of their pictures and progress lines.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "examples/common/options.h"
#include "examples/common/output.h"
#include "examples/common/panels.h"
#include "examples/common/progress.h"

namespace examples {

/// Parses the command line, locks the output folder, seeds the default generator and calls `run` with the folder and
/// the device. Returns the exit code. If an exception is thrown, prints its message after the name of the program.
inline int run_short_program(const char* name, const char* description, int64_t default_steps, int argc, char** argv,
                             void (*run)(int64_t steps, const std::filesystem::path& out, voxgrad::Device device)) {
  int64_t steps = default_steps;
  std::string out = std::string("out/") + name, device_text = "auto";
  uint64_t seed = 0;
  CLI::App app{description};
  app.add_option("--steps", steps, "optimizer steps")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--out", out, "folder for the results; only one run can use it at a time")
      ->check(not_empty())
      ->capture_default_str();
  app.add_option("--device", device_text, "auto, cpu, cuda or cuda:N")->check(device_name())->capture_default_str();
  app.add_option("--seed", seed, "seed of all random numbers")->check(whole_number())->capture_default_str();
  try {
    app.parse(argc, argv);
    const voxgrad::Device device = device_of(device_text);
    voxgrad::runtime(device).require(device.index);
    const OutputFolder folder(out);
    folder.check_writable((name + std::string(".png")).c_str());
    voxgrad::manual_seed(seed);
    run(steps, folder.path(), device);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << '\n';
    return 1;
  }
}

}  // namespace examples
