// A reader of JSON that passes on value by value, and a writer of text. There is no document in memory: the destructor
// of an nlohmann::json allocates, so running out of memory there would terminate the program.
#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "input_file.h"

namespace voxgrad {

struct JsonValue {
  std::string_view type;             ///< for messages: "null", "a boolean", "a number", "a string", "an array", ...
  std::string text{};                ///< of a string
  std::optional<int64_t> integer{};  ///< of an integer that fits in 64 bits
};
/// The keys that lead to a value; "" for an item of an array.
using JsonPath = std::vector<std::string>;

/// Calls visit(path, value) for each value of `text`, an object or array before its items. Throws Error if `text` is
/// not JSON or has more than 64 levels; `what` (it ends with a space) begins the message.
void read_json(const InputFile& file, const char* what, const std::string& text,
               const std::function<void(const JsonPath& path, const JsonValue& value)>& visit);

/// Returns `text` in quotes, escaped. A byte that is not part of UTF-8 becomes U+FFFD.
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
