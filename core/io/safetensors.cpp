// Reads and writes safetensors files.
//
// The header is parsed value by value to detect repeated keys, which other readers may interpret differently. A parsed
// JSON document would keep only the last of two equal keys.
#include "core/io/safetensors.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <iomanip>
#include <set>
#include <string_view>
#include <vector>

#include "core/io/atomic_file.h"
#include "core/io/detail/input_file.h"
#include "core/io/detail/json.h"

namespace voxgrad {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors elements are little-endian");

constexpr int64_t kMaxHeader = 100'000'000;
constexpr size_t kLengthBytes = 8;
constexpr const char* kMetadataKey = "__metadata__";

constexpr const char* kChecksumKey = "voxgrad.crc32";

struct DTypeName {
  const char* name;
  int64_t bits;
  std::optional<DType> dtype{};  ///< empty if voxgrad does not support the dtype
};
constexpr DTypeName kDTypes[] = {
    {"F32", 32, f32},   {"F64", 64, f64}, {"BF16", 16, bf16}, {"F16", 16, f16}, {"I64", 64, i64}, {"I32", 32, i32},
    {"U8", 8, u8},      {"BOOL", 8, b8},  {"U64", 64},        {"U32", 32},      {"U16", 16},      {"I16", 16},
    {"I8", 8},          {"C64", 64},      {"F8_E4M3", 8},     {"F8_E5M2", 8},   {"F8_E8M0", 8},   {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},   {"F6_E3M2", 6},     {"F4", 4},
};

const char* format_name(DType dtype) {
  return std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& entry) { return entry.dtype == dtype; })->name;
}

std::string tensor_named(const std::string& name) { return concat("tensor ", in_quotes(name), ": "); }

std::string json_of(const Shape& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(to_json(size));
  return json_array(sizes);
}

std::string json_of(const Metadata& metadata) {
  std::vector<std::pair<std::string, std::string>> members;
  for (const auto& [key, value] : metadata) members.emplace_back(key, to_json(value));
  return json_object(members);
}

/// Computes the checksum of a file: the CRC-32 of a JSON text that contains the metadata and, sorted by name, the
/// dtype, shape and CRC-32 of each tensor. The checksum does not depend on the order of the tensors in the file.
class Checksum {
 public:
  void add(const std::string& name, const Tensor& host) {
    const auto bytes = static_cast<size_t>(host.numel() * item_size(host.dtype()));
    const uLong crc = crc32_z(0, static_cast<const Bytef*>(host.raw_data()), bytes);
    tensors_[name] = json_array({to_json(format_name(host.dtype())), json_of(host.shape()), to_json(crc)});
  }
  /// Returns eight hexadecimal digits.
  std::string text(const Metadata& metadata) const {
    const std::string all = json_array({json_of(metadata), json_object({tensors_.begin(), tensors_.end()})});
    const uLong crc = crc32_z(0, reinterpret_cast<const Bytef*>(all.data()), all.size());
    return concat(std::hex, std::setw(8), std::setfill('0'), crc);
  }

 private:
  std::map<std::string, std::string> tensors_;  ///< tensor name -> JSON array of dtype, shape and CRC-32
};

/// The description of a tensor in the header, before the description is checked.
struct Claim {
  const DTypeName* dtype = nullptr;
  std::optional<Shape> shape;
  std::optional<std::vector<int64_t>> offsets;
};

/// Collects the values of a header. Throws unless the header consists of metadata and descriptions of tensors.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file) {}

  std::map<std::string, Claim> claims;
  Metadata metadata;

  void take(const JsonPath& path, const JsonValue& value) {
    if (path.size() == 1) take_entry(path[0], value);
    if (path.size() <= 1) return;
    if (path[0] == kMetadataKey) {
      file_.check(value.type == "a string", "metadata ", in_quotes(path[1]), " must be a string, found ", value.type);
      file_.check(metadata.emplace(path[1], value.text).second, "metadata ", in_quotes(path[1]), " occurs twice");
    } else if (path.size() == 2) {
      take_field(tensor_named(path[0]), path[1], value);
    } else {
      take_item(tensor_named(path[0]), path[1], value);
    }
  }

 private:
  void take_entry(const std::string& name, const JsonValue& value) {
    file_.check(names_.insert(name).second, "header entry ", in_quotes(name), " occurs twice");
    // The reference implementation also accepts null instead of metadata.
    const bool no_metadata = name == kMetadataKey && value.type == "null";
    file_.check(no_metadata || value.type == "an object", "header entry ", in_quotes(name),
                " must be an object, found ", value.type);
    if (name != kMetadataKey) claim_ = &claims[name];
  }

  void take_field(const std::string& what, const std::string& key, const JsonValue& value) {
    const bool known = key == "dtype" || key == "shape" || key == "data_offsets";
    file_.check(known, what, "unknown key ", in_quotes(key));
    const bool repeated = key == "dtype"   ? claim_->dtype != nullptr
                          : key == "shape" ? claim_->shape.has_value()
                                           : claim_->offsets.has_value();
    file_.check(!repeated, what, key, " occurs twice");
    file_.check(value.type == (key == "dtype" ? "a string" : "an array"), what, key, " must be ",
                key == "dtype" ? "a string" : "an array", ", found ", value.type);
    if (key == "shape") claim_->shape.emplace();
    if (key == "data_offsets") claim_->offsets.emplace();
    if (key != "dtype") return;
    const auto* dtype =
        std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& entry) { return value.text == entry.name; });
    file_.check(dtype != std::end(kDTypes), what, "unknown dtype ", in_quotes(value.text));
    claim_->dtype = dtype;
  }

  void take_item(const std::string& what, const std::string& key, const JsonValue& value) {
    file_.check(value.integer.value_or(-1) >= 0, what, key, " must contain non-negative integers, found ", value.type);
    if (key == "shape") {
      file_.check(claim_->shape->size() < kMaxRank, what, "more than ", kMaxRank, " axes");
      claim_->shape->push_back(*value.integer);
    } else {
      file_.check(claim_->offsets->size() < 2, what, "data_offsets must be two numbers");
      claim_->offsets->push_back(*value.integer);
    }
  }

  const InputFile& file_;
  Claim* claim_ = nullptr;  // the entry being read
  std::set<std::string> names_;
};

std::string read_header(InputFile& file) {
  file.check(file.size() >= static_cast<int64_t>(kLengthBytes), "truncated: ", file.size(),
             " bytes are too few for a header");
  uint64_t length = 0;
  file.read(&length, kLengthBytes);
  const std::string format = file.other_format();
  file.check(length <= kMaxHeader || format.empty(), "not a safetensors file", format);
  file.check(length <= kMaxHeader, "header length ", length, " exceeds ", kMaxHeader, " bytes");
  file.check_limit(static_cast<int64_t>(length), "the header");
  const int64_t available = file.size() - static_cast<int64_t>(kLengthBytes);
  file.check(static_cast<int64_t>(length) <= available, "header length ", length, " exceeds the ", available,
             " bytes that follow");
  std::string header(length, '\0');
  file.read(header.data(), header.size());
  file.check(header.starts_with('{'), "the header must begin with '{'", format);
  file.check(header[header.find_last_not_of(" \t\r\n")] == '}',
             "the header must end with '}', optionally followed by white space");
  // The JSON lexer would ignore everything after a zero byte.
  file.check(header.find('\0') == std::string::npos, "the header contains a zero byte");
  return header;
}

/// The checked description of a tensor.
struct Entry {
  const DTypeName* dtype;
  Shape shape;
  int64_t begin, end;  ///< byte range, relative to the end of the header
};

/// Converts the descriptions to entries. Throws unless their ranges cover `bytes` bytes without gaps or overlaps.
std::map<std::string, Entry> checked_layout(const InputFile& file, const std::map<std::string, Claim>& claims,
                                            int64_t bytes) {
  using Item = std::pair<const std::string, Claim>;
  std::vector<const Item*> order;
  for (const Item& item : claims) {
    const auto& [name, claim] = item;
    file.check(claim.dtype && claim.shape && claim.offsets, tensor_named(name), "needs dtype, shape and data_offsets");
    file.check(claim.offsets->size() == 2, tensor_named(name), "data_offsets must be two numbers");
    order.push_back(&item);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Item* a, const Item* b) { return *a->second.offsets < *b->second.offsets; });
  std::map<std::string, Entry> entries;
  int64_t position = 0;
  for (const Item* item : order) {
    const auto& [name, claim] = *item;
    const std::string what = tensor_named(name);
    const int64_t begin = (*claim.offsets)[0], end = (*claim.offsets)[1];
    const std::string range = concat("data_offsets [", begin, ", ", end, ']');
    file.check(begin <= end && end <= bytes, what, range, " do not lie in the ", bytes, " bytes of data");
    const int64_t expected = claimed_bytes(file, what, *claim.shape, claim.dtype->name, claim.dtype->bits);
    file.check(end - begin == expected, what, *claim.shape, ' ', claim.dtype->name, " takes ", expected, " bytes, but ",
               range, " contain ", end - begin);
    file.check(begin >= position, what, range, " overlap those of another tensor");
    file.check(begin == position, what, "the data has a gap at bytes ", position, " to ", begin,
               ", before this tensor");
    entries[name] = {claim.dtype, *claim.shape, begin, end};
    position = end;
  }
  file.check(position == bytes, "trailing bytes: tensors take ", position, " bytes, but the file has ", bytes);
  return entries;
}

void check_utf8(const char* what, const std::string& text) {
  check(is_utf8(text), "save_safetensors", what, ' ', in_quotes(text), " must be UTF-8");
}

/// Returns the JSON text of the header, padded so that the data begins at a multiple of 8 bytes.
std::string write_header(const std::vector<std::pair<std::string, Tensor>>& tensors, const Metadata& metadata) {
  std::vector<std::pair<std::string, std::string>> header;
  if (!metadata.empty()) header.emplace_back(kMetadataKey, json_of(metadata));
  int64_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t end = position + tensor.numel() * item_size(tensor.dtype());
    header.emplace_back(name, json_object({{"dtype", to_json(format_name(tensor.dtype()))},
                                           {"shape", json_of(tensor.shape())},
                                           {"data_offsets", json_array({to_json(position), to_json(end)})}}));
    position = end;
  }
  std::string text = json_object(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  check(text.size() <= kMaxHeader, "save_safetensors", "the header would take ", text.size(), " bytes, at most ",
        kMaxHeader, " are allowed");
  return text;
}

}  // namespace

SafetensorsContents read_safetensors(const std::filesystem::path& path, Device device,
                                     const LoadSafetensorsOptions& options, const char* op) {
  runtime(device).require(device.index);
  InputFile file(path, op, options.max_bytes);
  const std::string header = read_header(file);
  HeaderReader reader(file);
  read_json(file, "the header ", header, [&](auto& keys, auto& value) { reader.take(keys, value); });
  const int64_t data_begin = file.size() - file.remaining();
  const std::map<std::string, Entry> entries = checked_layout(file, reader.claims, file.remaining());
  const auto stored_checksum = reader.metadata.extract(kChecksumKey);

  int64_t bytes = 0;
  bool skipped = false;
  for (const auto& [name, entry] : entries) {
    const std::optional<DType> dtype = entry.dtype->dtype;
    file.check(dtype || options.skip_unsupported, tensor_named(name), "dtype ", entry.dtype->name,
               " is not supported; the option skip_unsupported skips such tensors");
    if (dtype) bytes += entry.end - entry.begin;
    skipped |= !dtype;
  }
  file.check_limit(bytes, "loading all tensors");
  const bool verify = stored_checksum && !skipped;
  Checksum checksum;
  TensorMap tensors;
  for (const auto& [name, entry] : entries) {
    if (!entry.dtype->dtype) continue;
    Tensor tensor = empty(entry.shape, {.dtype = *entry.dtype->dtype});
    file.read_at(data_begin + entry.begin, tensor.mutable_raw_data(), static_cast<size_t>(entry.end - entry.begin));
    if (tensor.dtype() == b8) check_bools(file, tensor_named(name), tensor);
    if (verify) checksum.add(name, tensor);
    tensors[name] = tensor.to(device);
  }
  if (verify) {
    const std::string found = checksum.text(reader.metadata);
    file.check(found == stored_checksum.mapped(), "the file is damaged: its contents have the checksum ", found,
               ", but it was saved with ", in_quotes(stored_checksum.mapped()));
  }
  return {std::move(tensors), std::move(reader.metadata), !stored_checksum.empty()};
}

TensorMap load_safetensors(const std::filesystem::path& path, Device device, Metadata* metadata,
                           const LoadSafetensorsOptions& options) {
  SafetensorsContents contents = read_safetensors(path, device, options, "load_safetensors");
  if (metadata != nullptr) *metadata = std::move(contents.metadata);
  return std::move(contents.tensors);
}

void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata,
                      const SaveSafetensorsOptions& options) {
  check(!tensors.empty(), "save_safetensors",
        "there are no tensors; a module must list its parameters and submodules in VG_MODULE");
  for (const auto& [name, tensor] : tensors) {
    check(tensor.defined(), "save_safetensors", "tensor ", in_quotes(name), " is undefined");
    check(name != kMetadataKey, "save_safetensors", "no tensor may be named ", kMetadataKey);
    check_utf8("the name of tensor", name);
  }
  for (const auto& [key, value] : metadata) {
    check(key != kChecksumKey, "save_safetensors", "no metadata key may be ", kChecksumKey);
    check_utf8("metadata", key);
    check_utf8("metadata", value);
  }
  // Tensors with wide elements come first, so that all elements are aligned in the file and can be memory-mapped.
  std::vector<std::pair<std::string, Tensor>> order(tensors.begin(), tensors.end());
  std::stable_sort(order.begin(), order.end(),
                   [](auto& a, auto& b) { return item_size(a.second.dtype()) > item_size(b.second.dtype()); });

  AtomicFile file(path, "save_safetensors");
  Checksum checksum;
  Metadata stored = metadata;
  const auto write_head = [&](const std::string& text) {
    if (options.checksum) stored[kChecksumKey] = text;
    const std::string header = write_header(order, stored);
    const uint64_t length = header.size();
    file.write(&length, kLengthBytes);
    file.write(header);
  };
  write_head("00000000");  // a placeholder; with options.checksum, the header is rewritten below
  for (const auto& [name, tensor] : order) {
    const Tensor host = tensor.detach().to(Device::cpu()).contiguous();
    file.write(host.raw_data(), static_cast<size_t>(host.numel() * item_size(host.dtype())));
    if (options.checksum) checksum.add(name, host);
  }
  if (options.checksum) {
    file.seek(0);
    write_head(checksum.text(metadata));
  }
  file.commit();
}

}  // namespace voxgrad
