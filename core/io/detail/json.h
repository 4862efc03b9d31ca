// Reads and writes JSON text. Documents are not objects of nlohmann::json: that class would drop repeated keys, and its
// destructor allocates memory and would terminate the program if memory has run out.
#pragma once

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "input_file.h"

namespace voxgrad {

struct JsonValue {
  std::string_view type;             ///< "null", "a boolean", "a number", "a string", "an array", ...
  std::string text{};                ///< the value of a string
  std::optional<int64_t> integer{};  ///< the value of an integer that fits in 64 bits
  /// The members of an object in the order of the text, including repeated keys; or the items of an array, without
  /// keys.
  std::vector<std::pair<std::string, JsonValue>> items{};
};

/// Parses `text`. Throws Error if `text` is not JSON, if it has more than 64 levels, or if an array has more than 64
/// items.
/// `what`, which must end with a space, is the prefix of the message.
JsonValue read_json(const InputFile& file, const char* what, const std::string& text);

/// Returns `text` in quotes, escaped. A byte that is not valid UTF-8 becomes U+FFFD.
std::string to_json(std::string_view text);
/// Returns the number, or "null" if it is not finite.
std::string to_json(double value);
template <std::integral T>
std::string to_json(T value) {
  return std::to_string(value);
}
/// Returns {"name":value,...}. The values are JSON.
std::string json_object(const std::vector<std::pair<std::string, std::string>>& members);
/// Returns [value,...]. The values are JSON.
std::string json_array(const std::vector<std::string>& values);
bool is_utf8(const std::string& text);

}  // namespace voxgrad
