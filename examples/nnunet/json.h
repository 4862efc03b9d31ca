// JSON files whose values are checked when they are read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <voxgrad.h>

namespace nnunet {

/// A value in a JSON file. The functions throw voxgrad::Error with the path of the file and the place of the value in
/// the file, such as "configurations.3d_fullres.patch_size[1]".
class Json {
 public:
  /// Reads a file of at most 64 MiB. Throws Error if the file cannot be read, is not JSON, or has a key twice in an
  /// object. Also throws for more than 64 levels, 2^18 values, 4096 keys in an object, or 256 bytes in a key.
  static Json load(const std::filesystem::path& path);

  /// Returns an object with the members of all objects in `chain`. If several objects have a key, the result has the
  /// value of the first of these objects.
  static Json merged(const std::vector<Json>& chain);

  /// Returns the value of a key. Throws if this value is not an object or does not have the key.
  Json at(const std::string& key) const;
  /// Returns the value of a key, or null if the key is missing. Throws if this value is not an object.
  Json find(const std::string& key) const;
  /// Returns true for null, and for the result of find() for a missing key.
  bool is_null() const { return value_->is_null(); }
  bool is_object() const { return value_->is_object(); }
  bool is_array() const { return value_->is_array(); }
  bool is_text() const { return value_->is_string(); }
  bool is_integer() const { return value_->is_number_integer(); }

  /// boolean(), integer(), number() and text() return the value. They throw if the value has a different type. number()
  /// also throws if the number is not finite.
  bool boolean() const;
  int64_t integer() const;
  double number() const;
  std::string text() const;
  /// Returns the items of an array.
  std::vector<Json> items() const;
  /// Returns the members of an object, in the order of the file.
  std::vector<std::pair<std::string, Json>> members() const;
  /// Returns an array of exactly `count` numbers.
  std::vector<double> numbers(size_t count) const;

  /// Throws Error with the path of the file and the place of the value, followed by `parts`.
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    voxgrad::fail("nnU-Net", place(), parts...);
  }
  /// Calls fail(parts...) unless `condition` holds.
  template <class... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) fail(parts...);
  }
  /// Throws Error unless `condition` holds. The message contains the value and the list `supported`.
  void check_supported(bool condition, const std::string& supported) const;

 private:
  using Document = nlohmann::ordered_json;
  struct File {
    std::filesystem::path path;
    Document document;
  };
  Json(std::shared_ptr<const File> file, const Document* value, std::string where)
      : file_(std::move(file)), value_(value), where_(std::move(where)) {}
  Json member(const std::string& key, const Document& value) const;
  /// Returns "'plans.json': spacing[1] ", or "'plans.json' " for the whole document.
  std::string place() const;
  /// Throws Error unless `good` is true. `expected` describes a valid value.
  void expect(bool good, const char* expected) const;

  std::shared_ptr<const File> file_;
  const Document* value_;
  std::string where_;
};

}  // namespace nnunet
