// Named numbers of an object, to be written to a state_dict and read back.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/safetensors.h"

namespace voxgrad::nn {

/// Where a number lives. Written as a tensor without axes: f64, i64 (unsigned ones by their bits), bool.
using FieldAddress = std::variant<double*, int64_t*, uint64_t*, bool*>;
using Fields = std::vector<std::pair<std::string, FieldAddress>>;

/// Adds each number to `state` as prefix + name.
void write_fields(TensorMap& state, const std::string& prefix, const Fields& fields);
/// Sets each number from `state`. Throws, with `op` in front, for a missing name and for another shape or dtype;
/// numbers before it have been set by then.
void read_fields(const TensorMap& state, const std::string& prefix, const Fields& fields, const char* op);

/// Adds "class.<name>", the version of what <name> writes.
void write_class(TensorMap& state, const char* name);
/// Throws for another version than write_class() gives.
void check_version(const TensorMap& state, const char* name);

/// The entries whose names begin with `prefix`, without it.
TensorMap with_prefix(const TensorMap& state, const std::string& prefix);
/// Adds `entries` to `state`, their names behind `prefix`.
void add_prefixed(TensorMap& state, const std::string& prefix, const TensorMap& entries);

}  // namespace voxgrad::nn
