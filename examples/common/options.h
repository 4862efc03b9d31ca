// What several example programs take on the command line.
#pragma once

#include <voxgrad.h>

#include <CLI/CLI.hpp>
#include <string>

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

}  // namespace examples
