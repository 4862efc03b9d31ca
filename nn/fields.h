// Objects with a state_dict, and functions that store named numbers in a state_dict.
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

/// The address of a number. A state_dict stores the number as a scalar tensor of dtype f64, i64 or bool. An unsigned
/// number is stored as the i64 with the same bits.
using FieldAddress = std::variant<double*, int64_t*, uint64_t*, bool*>;
/// Named numbers of an object.
using Fields = std::vector<std::pair<std::string, FieldAddress>>;

/// Splits a list at its commas and removes the trailing underscore of each name: "weight, bias_" becomes
/// {"weight", "bias"}.
std::vector<std::string> split_names(const char* list);
/// Pairs each name in the comma-separated list `names` with the address of the argument at the same position in
/// `numbers`. Throws if there are more or fewer names than numbers.
template <class... Ts>
Fields named_fields(const char* names, Ts&... numbers) {
  Fields fields;
  const std::vector<std::string> split = split_names(names);
  check(split.size() == sizeof...(numbers), "named_fields", sizeof...(numbers),
        " numbers were passed, but the names are ", names);
  size_t i = 0;
  (fields.emplace_back(split[i++], &numbers), ...);
  return fields;
}
/// Sets the first field whose name is in `names`. The field must be a double. Returns false if there is no such field.
bool set_field(const Fields& fields, std::initializer_list<std::string_view> names, double value);

/// Base class of objects whose state a program can save and restore.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Returns the state as named tensors.
  virtual TensorMap state_dict() const = 0;
  /// Throws the Error that load_state_dict(state) would throw. Changes nothing.
  void check_state_dict(const TensorMap& state) const { const_cast<Stateful*>(this)->read_state(state, false); }
  /// Restores a state. Throws Error, before anything is changed, if an entry is missing or has the wrong shape or
  /// dtype, or if an option or a count is out of range. Optimizers, schedules, averages and scalers also reject
  /// unexpected entries. The values of tensors with several elements are not checked.
  void load_state_dict(const TensorMap& state) { read_state(state, true); }

 protected:
  /// Checks all entries of `state`, and restores the state if `keep`.
  virtual void read_state(const TensorMap& state, bool keep) = 0;
};

/// Adds each field to `state` under the name prefix + name.
void write_fields(TensorMap& state, const std::string& prefix, const Fields& fields);
/// Checks the entries of `state` for all fields. If `keep`, sets the fields. Throws an Error that begins with `op`
/// if an entry is missing or has the wrong shape or dtype, or if a double is NaN. Also throws if an int64_t does not
/// lie in [0, 2^62], because each int64_t is a count. After an error, all fields are unchanged.
void read_fields(const TensorMap& state, const std::string& prefix, const Fields& fields, const char* op,
                 bool keep = true);

/// Returns a state that contains the fields and an entry "class.<name>", which holds the version of the format.
TensorMap write_state(const char* name, const Fields& fields);
/// Throws "this is not the state of <article> <name>" if `state` has no entry "class.<name>". Also throws if the
/// version of the format differs.
void check_class(const TensorMap& state, const char* name, const char* article);

/// Returns the entries whose names begin with `prefix`, and removes the prefix from the names.
TensorMap with_prefix(const TensorMap& state, const std::string& prefix);
/// Adds `entries` to `state` under the names prefix + name.
void add_prefixed(TensorMap& state, const std::string& prefix, const TensorMap& entries);

}  // namespace voxgrad::nn
