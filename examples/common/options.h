// Command-line options that several example programs have.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string>
#include <thread>

namespace examples {

/// For a path. Refuses an empty one, which is usually an unset variable in a script.
inline CLI::Validator not_empty() {
  return CLI::Validator([](const std::string& text) { return std::string(text.empty() ? "must not be empty" : ""); },
                        "PATH");
}

/// For a finite number from `least` to `most`. CLI::Range accepts NaN, because NaN compares as neither less nor
/// greater.
inline CLI::Validator number_in(double least, double most) {
  const std::string range = voxgrad::concat("from ", least, " to ", most);
  return CLI::Validator(
      [=](const std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
        return good ? std::string() : text + " is not a number " + range;
      },
      "FLOAT " + range);
}

/// For a uint64_t. CLI11 reads numbers by strtoull, which accepts -1 and replaces numbers that are too large.
inline CLI::Validator whole_number() {
  return CLI::Validator(
      [](const std::string& text) {
        uint64_t value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && std::to_string(value) == text;
        return good ? std::string() : text + " is not a whole number from 0 to 2^64 - 1";
      },
      "UINT64");
}

/// For a device's name, or "auto".
inline CLI::Validator device_name() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        if (text == "auto") return {};
        try {
          voxgrad::Device::parse(text);
          return {};
        } catch (const voxgrad::Error& error) {
          return error.what();
        }
      },
      "DEVICE");
}

/// Throws CLI::ValidationError if --gpus cannot be combined with --device, or with --profile.
inline void check_gpu_options(int gpus, const std::string& device, bool profile) {
  const std::string given = "--gpus " + std::to_string(gpus);
  if (gpus > 0 && device != "auto" && device != "cuda")
    throw CLI::ValidationError(given + " uses the first GPUs, so --device must be auto or cuda, got " + device);
  // The profiler would wait for all GPUs, and the other ranks wait for the rank that profiles.
  if (gpus > 1 && profile) throw CLI::ValidationError("--profile needs a single GPU, got " + given);
}

/// The device of that name; "auto" is a GPU if there is one.
inline voxgrad::Device device_of(const std::string& name) {
  if (name != "auto") return voxgrad::Device::parse(name);
  return voxgrad::cuda::is_available() ? voxgrad::Device::cuda() : voxgrad::Device::cpu();
}

/// Adds --tensorboard. `folder` stays empty if the option is not given.
inline CLI::Option* add_tensorboard_option(CLI::App& app, std::string& folder) {
  return app.add_option("--tensorboard", folder, "folder for TensorBoard's event files")->check(not_empty());
}

/// Adds --workers. `workers` keeps its value if the option is not given.
inline CLI::Option* add_workers_option(CLI::App& app, int64_t& workers) {
  return app
      .add_option("--workers", workers,
                  "threads that cut patches, for each GPU (default: three quarters of the host's threads, at most 12; "
                  "1 on the CPU)")
      ->check(CLI::Range(0, 64));
}

/// The default of --workers. Training on the CPU needs its threads, so one thread cuts patches there.
inline int64_t default_workers(voxgrad::Device device, int gpus) {
  const int64_t threads = std::thread::hardware_concurrency();
  return device.is_cpu() ? 1 : std::clamp<int64_t>(threads * 3 / 4 / std::max(gpus, 1), 1, 12);
}

/// The value of --precision.
class Precision {
 public:
  /// `chosen` is appended to the help text. A program that chooses the precision itself passes an empty name.
  static CLI::Option* add_option(CLI::App& app, std::string& name, const std::string& chosen = {}) {
    return app
        .add_option("--precision", name,
                    "highest (float32), high (on a GPU TF32), bf16 or f16 (autocast; f16 with a scaled loss)" + chosen)
        ->check(CLI::IsMember({"highest", "high", "bf16", "f16"}))
        ->capture_default_str();
  }

  explicit Precision(const std::string& name) : name_(name) {
    if (name == "bf16" || name == "f16") half_ = voxgrad::parse_dtype(name);
  }
  /// Sets the precision of float32 products from now on.
  void set_float32() const {
    voxgrad::set_float32_precision(name_ == "high" ? voxgrad::Float32Precision::high
                                                   : voxgrad::Float32Precision::highest);
  }
  bool is_half() const { return half_.has_value(); }
  /// For the forward pass and the loss.
  voxgrad::autocast autocast() const { return voxgrad::autocast(half_.value_or(voxgrad::f32), is_half()); }
  voxgrad::optim::GradScaler scaler() const { return voxgrad::optim::GradScaler({.enabled = half_ == voxgrad::f16}); }
  /// For reports: "bf16 (autocast)", "float32", "float32 (high)".
  std::string text(voxgrad::Device device) const {
    if (is_half()) return name_ + " (autocast)";
    return device.is_cuda() ? "float32 (" + name_ + ")" : "float32";
  }

 private:
  std::string name_;
  std::optional<voxgrad::DType> half_;
};

}  // namespace examples
