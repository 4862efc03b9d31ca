// What objects keep in a state_dict, and their named numbers there.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "../core/io/safetensors.h"

namespace voxgrad::nn {

/// Where a number lives. Written as a tensor without axes: f64, i64 (unsigned ones by their bits), bool.
using FieldAddress = std::variant<double*, int64_t*, uint64_t*, bool*>;
using Fields = std::vector<std::pair<std::string, FieldAddress>>;

/// "weight, bias_" as {"weight", "bias"}: a member's trailing underscore is no part of its name.
std::vector<std::string> split_names(const char* list);
/// The numbers by the names that split_names() makes of `names`.
template <class... Ts>
Fields named_fields(const char* names, Ts&... numbers) {
  Fields fields;
  const std::vector<std::string> split = split_names(names);
  check(split.size() == sizeof...(numbers), "named_fields", sizeof...(numbers), " numbers are named ", names);
  size_t i = 0;
  (fields.emplace_back(split[i++], &numbers), ...);
  return fields;
}
/// Sets the first field, a double, that has one of these names. Returns whether there is one.
bool set_field(const Fields& fields, std::initializer_list<std::string_view> names, double value);

/// What has a state that a program may keep and go on with.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual TensorMap state_dict() const = 0;
  /// Throws as load_state_dict does, and changes nothing.
  void check_state_dict(const TensorMap& state) const { const_cast<Stateful*>(this)->read_state(state, false); }
  /// Throws, before anything is changed, for what such an object does not write, and for numbers that no run leaves.
  void load_state_dict(const TensorMap& state) { read_state(state, true); }

 protected:
  /// Checks all of `state`; takes it over only if `keep`.
  virtual void read_state(const TensorMap& state, bool keep) = 0;
};

/// Adds each number to `state` as prefix + name.
void write_fields(TensorMap& state, const std::string& prefix, const Fields& fields);
/// Sets each number from `state`. Throws, with `op` in front, for a missing name and for another shape or dtype;
/// numbers before it have been set by then.
void read_fields(const TensorMap& state, const std::string& prefix, const Fields& fields, const char* op);

/// Throws, with `op` in front, if a floating tensor holds NaN; if it must be `finite`, also for infinities; if it may
/// not be `negative`, also for values below 0. Waits for the device.
void check_values(const char* op, const std::string& name, const Tensor& values, bool finite, bool negative = true);

/// "class.<name>", the version of what <name> writes, and the fields.
TensorMap write_state(const char* name, const Fields& fields);
/// Throws unless `state` has "class.<name>": "this is not the state of <article> <name>"; and for another version.
void check_class(const TensorMap& state, const char* name, const char* article);

/// The entries whose names begin with `prefix`, without it.
TensorMap with_prefix(const TensorMap& state, const std::string& prefix);
/// Adds `entries` to `state`, their names behind `prefix`.
void add_prefixed(TensorMap& state, const std::string& prefix, const TensorMap& entries);

}  // namespace voxgrad::nn
