// Writes zip archives, for tests of checkpoints.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace voxgrad {

/// Returns the bytes of a number in little-endian order.
template <class T>
std::string little_endian(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// An entry of a zip archive. Tests change the fields to write malformed archives.
struct ZipEntry {
  std::string name;
  std::string contents;
  uint16_t method = 0;  ///< compression method in the headers; 0 means not compressed
};

/// Returns the bytes of a zip archive without checksums.
inline std::string zip_of(const std::vector<ZipEntry>& entries) {
  std::string bytes, directory;
  for (const auto& [name, contents, method] : entries) {
    const auto offset = static_cast<uint32_t>(bytes.size());
    const auto size = static_cast<uint32_t>(contents.size());
    const std::string common = little_endian(uint16_t{20}) + little_endian(uint16_t{0}) + little_endian(method) +
                               std::string(8, '\0') + little_endian(size) + little_endian(size) +
                               little_endian(static_cast<uint16_t>(name.size())) + little_endian(uint16_t{0});
    bytes += "PK\x03\x04" + common + name + contents;
    directory +=
        "PK\x01\x02" + little_endian(uint16_t{20}) + common + std::string(10, '\0') + little_endian(offset) + name;
  }
  const auto count = static_cast<uint16_t>(entries.size());
  return bytes + directory + "PK\x05\x06" + std::string(4, '\0') + little_endian(count) + little_endian(count) +
         little_endian(static_cast<uint32_t>(directory.size())) + little_endian(static_cast<uint32_t>(bytes.size())) +
         std::string(2, '\0');
}

}  // namespace voxgrad
