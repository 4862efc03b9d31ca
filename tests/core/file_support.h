// Helpers shared by the tests of the file formats: a temporary directory, files with given bytes, and damaged files.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/device.h"
#include "core/error.h"
#include "tests/support.h"

namespace voxgrad {

/// Returns the bytes of a number, little- or big-endian.
template <class T>
std::string bytes_of(T value, bool big_endian = false) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  if (big_endian) std::reverse(bytes.begin(), bytes.end());
  return bytes;
}

/// A fixture that gives each test an empty temporary directory.
class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    static std::atomic<int> count{0};
    directory_ = std::filesystem::temp_directory_path() / concat("voxgrad-test-", getpid(), "-", count++);
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path path(const std::string& name) const { return directory_ / name; }
  std::filesystem::path put(const std::string& name, const std::string& bytes) const {
    // Remove the file instead of truncating it: ext4 flushes truncated files on close, which would slow down tests
    // that write thousands of damaged files.
    std::filesystem::remove(path(name));
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  static std::string get(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Returns whether a tensor of this process maps the file.
  static bool is_mapped(const std::filesystem::path& file) {
    return get("/proc/self/maps").find(file.string()) != std::string::npos;
  }
  /// Returns the number of files in the directory. Tests use it to find leftover temporary files.
  int64_t file_count() const {
    return std::distance(std::filesystem::directory_iterator(directory_), std::filesystem::directory_iterator());
  }

  /// Expects that `load` throws Error for every proper prefix of `bytes`. With any one byte changed, `load` must either
  /// succeed or throw an Error other than OutOfMemoryError. The peak memory of these calls must stay below 64 times the
  /// file size.
  template <class Load>
  void expect_loads_or_rejects_damaged(const std::string& name, const std::string& bytes, Load load) const {
    ASSERT_NO_THROW(load(put(name, bytes)));
    for (size_t length = 0; length < bytes.size(); ++length)
      EXPECT_THROW(load(put(name, bytes.substr(0, length))), Error) << "cut to " << length << " bytes";
    const int64_t before = memory::stats().current;
    memory::reset_peak();
    for (size_t position = 0; position < bytes.size(); ++position) {
      for (const int change : {0x01, 0x02, 0x10, 0x20, 0x80, 0xff}) {
        std::string damaged = bytes;
        damaged[position] = static_cast<char>(damaged[position] ^ change);
        try {
          load(put(name, damaged));
        } catch (const OutOfMemoryError& error) {
          ADD_FAILURE() << "byte " << position << " ^ " << change << ": " << error.what();
        } catch (const Error&) {
        }
      }
    }
    EXPECT_LE(memory::stats().peak - before, static_cast<int64_t>(64 * bytes.size()));
  }

 private:
  std::filesystem::path directory_;
};

}  // namespace voxgrad
