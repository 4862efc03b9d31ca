#include "core/json_text.h"

#include <charconv>
#include <cmath>

namespace voxgrad {
namespace {

/// Bytes of the UTF-8 character at the start of `text`; 0 if there is no such character.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool surrogate = first == 0xed && second > 0x9f, above_10ffff = first == 0xf4 && second > 0x8f;
  return overlong || surrogate || above_10ffff ? 0 : length;
}

std::string escaped(char c) {
  constexpr std::string_view kShort = "\"\"\\\\\bb\ff\nn\rr\tt", kDigits = "0123456789abcdef";
  for (size_t i = 0; i < kShort.size(); i += 2)
    if (c == kShort[i]) return {'\\', kShort[i + 1]};
  if (static_cast<unsigned char>(c) >= 0x20) return {c};
  return {'\\', 'u', '0', '0', kDigits[static_cast<size_t>(c) / 16], kDigits[static_cast<size_t>(c) % 16]};
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string to_json(std::string_view text) {
  std::string json = "\"";
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0)
      json += "\xef\xbf\xbd";
    else if (length == 1)
      json += escaped(text[0]);
    else
      json += text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return json += '"';
}

std::string to_json(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string json_object(const std::vector<std::pair<std::string, std::string>>& members) {
  std::string json = "{";
  for (const auto& [name, value] : members) {
    if (json.size() > 1) json += ',';
    json += to_json(name) += ':';
    json += value;
  }
  return json += '}';
}

std::string json_array(const std::vector<std::string>& values) {
  std::string json = "[";
  for (const std::string& value : values) {
    if (json.size() > 1) json += ',';
    json += value;
  }
  return json += ']';
}

}  // namespace voxgrad
