// Sample volumes from a Debian package.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

namespace examples {

/// Returns the path of a file of Debian's package mricron-data, or nothing if the package is not installed.
inline std::optional<std::filesystem::path> find_sample(const std::string& file_name) {
  const std::filesystem::path path = std::filesystem::path("/usr/share/mricron/templates") / file_name;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) return path;
  return std::nullopt;
}

}  // namespace examples
