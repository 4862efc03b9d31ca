// JSON that is written as text, piece by piece. A document in memory (nlohmann::json) takes memory in its destructor,
// so that a program that runs out of memory would end there.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace voxgrad {

bool is_utf8(std::string_view text);

/// Returns `text` in quotes, escaped. A byte that is not part of UTF-8 becomes U+FFFD.
std::string to_json(std::string_view text);
/// Returns the shortest text that is read back as `value`, or "null" if it is not finite.
std::string to_json(double value);
template <std::integral T>
std::string to_json(T value) {
  return std::to_string(value);
}

/// Returns {"name":value,...}. The values are JSON.
std::string json_object(const std::vector<std::pair<std::string, std::string>>& members);
/// Returns [value,...]. The values are JSON.
std::string json_array(const std::vector<std::string>& values);

}  // namespace voxgrad
