#include "nn/fields.h"

#include <bit>
#include <type_traits>

#include "ops/create.h"

namespace voxgrad::nn {
namespace {

constexpr int64_t kVersion = 1;

/// How a number of type T is stored.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, uint64_t>, int64_t, T>;

template <class T>
void write_field(Tensor& tensor, T value) {
  tensor = empty({}, {.dtype = dtype_of<Stored<T>>});
  *tensor.mutable_data<Stored<T>>() = std::bit_cast<Stored<T>>(value);
}

template <class T>
T read_field(const Tensor& tensor) {
  return std::bit_cast<T>(*tensor.to(Device::cpu()).data<Stored<T>>());
}

}  // namespace

void write_fields(TensorMap& state, const std::string& prefix, const Fields& fields) {
  for (const auto& [name, address] : fields) {
    Tensor& tensor = state[prefix + name];
    std::visit([&](auto* value) { write_field(tensor, *value); }, address);
  }
}

void read_fields(const TensorMap& state, const std::string& prefix, const Fields& fields, const char* op) {
  for (const auto& [name, address] : fields) {
    const std::string key = prefix + name;
    const auto entry = state.find(key);
    check(entry != state.end(), op, "the state has no ", key);
    const Tensor& tensor = entry->second;
    std::visit(
        [&]<class T>(T* value) {
          const bool fits = tensor.defined() && tensor.dim() == 0 && tensor.dtype() == dtype_of<Stored<T>>;
          check(fits, op, key, " must be one ", dtype_of<Stored<T>>, ", got ", describe(tensor));
          *value = read_field<T>(tensor);
        },
        address);
  }
}

void write_class(TensorMap& state, const char* name) {
  int64_t version = kVersion;
  write_fields(state, "class.", {{name, &version}});
}

void check_version(const TensorMap& state, const char* name) {
  int64_t version = 0;
  read_fields(state, "class.", {{name, &version}}, name);
  check(version == kVersion, name, "class.", name, " must be ", kVersion, ", the version read here, got ", version);
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
