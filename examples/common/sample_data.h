// Volumes that a distribution's package brings.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

namespace examples {

/// A file of Debian's package mricron-data, if it is installed.
inline std::optional<std::filesystem::path> find_sample(const std::string& file_name) {
  const std::filesystem::path path = std::filesystem::path("/usr/share/mricron/templates") / file_name;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) return path;
  return std::nullopt;
}

}  // namespace examples
