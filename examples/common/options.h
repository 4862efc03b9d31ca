// What several example programs take on the command line.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string>
#include <thread>

namespace examples {

/// For a path: an empty one is a variable that was not set in somebody's script.
inline CLI::Validator not_empty() {
  return CLI::Validator([](const std::string& text) { return std::string(text.empty() ? "must not be empty" : ""); },
                        "PATH");
}

/// For a uint64_t: strtoull, which reads it, takes -1 and what is too large for the largest number.
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

/// The device of that name; "auto" is a GPU if there is one.
inline voxgrad::Device device_of(const std::string& name) {
  if (name != "auto") return voxgrad::Device::parse(name);
  return voxgrad::cuda::is_available() ? voxgrad::Device::cuda() : voxgrad::Device::cpu();
}

/// --tensorboard, for a folder that is empty where the option is not there.
inline CLI::Option* add_tensorboard_option(CLI::App& app, std::string& folder) {
  return app.add_option("--tensorboard", folder, "folder for event files, which TensorBoard shows")->check(not_empty());
}

/// --workers, left as it is where the option is not there.
inline CLI::Option* add_workers_option(CLI::App& app, int64_t& workers) {
  return app
      .add_option(
          "--workers", workers,
          "threads that cut patches, for each GPU (default: three quarters of the host's, at most 12; 1 on the CPU)")
      ->check(CLI::Range(0, 64));
}

/// A CPU that trains has its threads for that.
inline int64_t default_workers(voxgrad::Device device, int gpus) {
  const int64_t threads = std::thread::hardware_concurrency();
  return device.is_cpu() ? 1 : std::clamp<int64_t>(threads * 3 / 4 / std::max(gpus, 1), 1, 12);
}

/// What --precision says.
class Precision {
 public:
  /// `chosen`: what the help says of an empty name, which the program fills in.
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
  /// How float32 is multiplied from now on.
  void set_float32() const {
    voxgrad::set_float32_precision(name_ == "high" ? voxgrad::Float32Precision::high
                                                   : voxgrad::Float32Precision::highest);
  }
  bool is_half() const { return half_.has_value(); }
  /// For the forward pass and the loss.
  voxgrad::autocast autocast() const { return voxgrad::autocast(half_.value_or(voxgrad::f32), is_half()); }
  voxgrad::optim::GradScaler scaler() const { return voxgrad::optim::GradScaler({.enabled = half_ == voxgrad::f16}); }
  /// For people: "bf16 (autocast)", "float32", "float32 (high)".
  std::string text(voxgrad::Device device) const {
    if (is_half()) return name_ + " (autocast)";
    return device.is_cuda() ? "float32 (" + name_ + ")" : "float32";
  }

 private:
  std::string name_;
  std::optional<voxgrad::DType> half_;
};

}  // namespace examples
