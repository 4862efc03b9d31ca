// Command-line options that several example programs share.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string>
#include <thread>

namespace examples {

/// Validates a path. Rejects an empty path, which usually comes from an unset variable in a script.
inline CLI::Validator not_empty() {
  return CLI::Validator([](const std::string& text) { return std::string(text.empty() ? "must not be empty" : ""); },
                        "PATH");
}

/// Validates a number from `min` to `max`. Rejects NaN. (CLI::Range accepts NaN, because NaN is neither less than `min`
/// nor greater than `max`.)
inline CLI::Validator number_in(double min, double max) {
  const std::string range = voxgrad::concat("from ", min, " to ", max);
  return CLI::Validator(
      [=](const std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && value >= min && value <= max;
        return good ? std::string() : text + " is not a number " + range;
      },
      "FLOAT " + range);
}

/// Validates a uint64_t. Rejects negative numbers and numbers above 2^64 - 1: CLI11 parses them with strtoull, which
/// returns a different number instead of an error.
inline CLI::Validator whole_number() {
  return CLI::Validator(
      [](const std::string& text) {
        uint64_t value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && std::to_string(value) == text;
        return good ? std::string() : text + " is not a whole number from 0 to 2^64 - 1";
      },
      "UINT64");
}

/// Validates the name of a device, or "auto".
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

/// Throws CLI::ValidationError if the value of --gpus is incompatible with --device or with --profile.
inline void check_gpu_options(int gpus, const std::string& device, bool profile) {
  const std::string given = "--gpus " + std::to_string(gpus);
  if (gpus > 0 && device != "auto" && device != "cuda")
    throw CLI::ValidationError(given + " uses the first GPUs, so --device must be auto or cuda, got " + device);
  // With several GPUs, this would cause a deadlock: the profiler waits for all GPUs, and the other ranks wait for the
  // rank that profiles.
  if (gpus > 1 && profile) throw CLI::ValidationError("--profile needs a single GPU, got " + given);
}

/// Returns the device with this name. "auto" selects a GPU if one is available, otherwise the CPU.
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
                  "threads per GPU that extract patches (default: 1 on the CPU; on GPUs, three quarters of the host's "
                  "threads divided by --gpus, but 1 to 12)")
      ->check(CLI::Range(0, 64));
}

/// Returns the default value of --workers. On the CPU, the value is 1, because training itself uses the other threads.
inline int64_t default_workers(voxgrad::Device device, int gpus) {
  const int64_t threads = std::thread::hardware_concurrency();
  return device.is_cpu() ? 1 : std::clamp<int64_t>(threads * 3 / 4 / std::max(gpus, 1), 1, 12);
}

/// The value of --precision: "highest", "high", "bf16" or "f16".
class Precision {
 public:
  /// Adds --precision. The initial value of `name` is the default value of the option. The help shows this value unless
  /// `name` is empty. `help_suffix` is appended to the help text.
  static CLI::Option* add_option(CLI::App& app, std::string& name, const std::string& help_suffix = {}) {
    return app
        .add_option("--precision", name,
                    "highest (float32), high (TF32 on a GPU), bf16 or f16 (autocast)" + help_suffix)
        ->check(CLI::IsMember({"highest", "high", "bf16", "f16"}))
        ->capture_default_str();
  }

  explicit Precision(const std::string& name) : name_(name) {
    if (name == "bf16" || name == "f16") half_ = voxgrad::parse_dtype(name);
  }
  /// Sets the precision of float32 matrix products and convolutions.
  void set_float32() const {
    voxgrad::set_float32_precision(name_ == "high" ? voxgrad::Float32Precision::high
                                                   : voxgrad::Float32Precision::highest);
  }
  /// Returns bf16 or f16, or nothing for the other precisions.
  std::optional<voxgrad::DType> half() const { return half_; }
  /// Returns an autocast guard for the forward pass and the loss. The guard is disabled unless the precision is bf16 or
  /// f16.
  voxgrad::autocast autocast() const { return voxgrad::autocast(half_.value_or(voxgrad::f32), half_.has_value()); }
  /// Returns a gradient scaler, which is enabled only for f16.
  voxgrad::optim::GradScaler scaler() const { return voxgrad::optim::GradScaler({.enabled = half_ == voxgrad::f16}); }
  /// Returns a description of the precision for reports, such as "bf16 (autocast)", "float32" or "float32 (high)".
  std::string text(voxgrad::Device device) const {
    if (half_) return name_ + " (autocast)";
    return device.is_cuda() ? "float32 (" + name_ + ")" : "float32";
  }

 private:
  std::string name_;
  std::optional<voxgrad::DType> half_;
};

}  // namespace examples
