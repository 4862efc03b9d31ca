// Implements the storage of named numbers in a state_dict.
#include "nn/fields.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <sstream>
#include <type_traits>

#include "ops/create.h"

namespace voxgrad::nn {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMaxCount = int64_t{1} << 62;  // so small that incrementing a count cannot overflow

/// The element type of the tensor that stores a T.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, uint64_t>, int64_t, T>;

template <class T>
T read_field(const Tensor& tensor) {
  return std::bit_cast<T>(*tensor.to(Device::cpu()).data<Stored<T>>());
}

}  // namespace

std::vector<std::string> split_names(const char* list) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) {
    const size_t begin = name.find_first_not_of(" \t\n"), end = name.find_last_not_of(" \t\n");
    name = name.substr(begin, end - begin + 1);
    if (name.size() > 1 && name.back() == '_') name.pop_back();
    names.push_back(name);
  }
  return names;
}

bool set_field(const Fields& fields, std::initializer_list<std::string_view> names, double value) {
  const auto named = [&](const auto& field) {
    return std::find(names.begin(), names.end(), field.first) != names.end();
  };
  const auto field = std::find_if(fields.begin(), fields.end(), named);
  if (field != fields.end()) *std::get<double*>(field->second) = value;
  return field != fields.end();
}

void write_fields(TensorMap& state, const std::string& prefix, const Fields& fields) {
  for (const auto& [name, address] : fields) {
    Tensor& tensor = state[prefix + name];
    const auto write = [&]<class T>(const T* value) {
      tensor = empty({}, {.dtype = dtype_of<Stored<T>>});
      *tensor.mutable_data<Stored<T>>() = std::bit_cast<Stored<T>>(*value);
    };
    std::visit(write, address);
  }
}

void read_fields(const TensorMap& state, const std::string& prefix, const Fields& fields, const char* op, bool keep) {
  for (const auto& [name, address] : fields) {
    const std::string key = prefix + name;
    const auto entry = state.find(key);
    check(entry != state.end(), op, "the state has no ", key);
    const Tensor& tensor = entry->second;
    const auto check_field = [&]<class T>(T*) {
      const bool fits = tensor.defined() && tensor.dim() == 0 && tensor.dtype() == dtype_of<Stored<T>>;
      check(fits, op, key, " must be a scalar ", dtype_of<Stored<T>>, ", got ", describe(tensor));
      const T value = read_field<T>(tensor);
      if constexpr (std::is_same_v<T, int64_t>)
        check(value >= 0 && value <= kMaxCount, op, key, " must lie in [0, 2^62], got ", value);
      if constexpr (std::is_same_v<T, double>) check(!std::isnan(value), op, key, " must not be NaN");
    };
    std::visit(check_field, address);
  }
  if (!keep) return;
  for (const auto& [name, address] : fields) {
    const Tensor& tensor = state.at(prefix + name);
    std::visit([&]<class T>(T* value) { *value = read_field<T>(tensor); }, address);
  }
}

TensorMap write_state(const char* name, const Fields& fields) {
  TensorMap state;
  int64_t version = kVersion;
  write_fields(state, "class.", {{name, &version}});
  write_fields(state, "", fields);
  return state;
}

void check_class(const TensorMap& state, const char* name, const char* article) {
  check(state.contains(concat("class.", name)), name, "this is not the state of ", article, ' ', name);
  int64_t version = 0;
  read_fields(state, "class.", {{name, &version}}, name);
  check(version == kVersion, name, "class.", name, " must be version ", kVersion, ", got ", version);
}

TensorMap with_prefix(const TensorMap& state, const std::string& prefix) {
  TensorMap found;
  for (auto entry = state.lower_bound(prefix); entry != state.end() && entry->first.starts_with(prefix); ++entry)
    found.emplace(entry->first.substr(prefix.size()), entry->second);
  return found;
}

void add_prefixed(TensorMap& state, const std::string& prefix, const TensorMap& entries) {
  for (const auto& [name, tensor] : entries) state[prefix + name] = tensor;
}

}  // namespace voxgrad::nn
