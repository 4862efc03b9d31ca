// Reads and writes safetensors files. Repeated keys are rejected, because other readers may interpret them differently.
#include "core/io/safetensors.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <iomanip>
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

constexpr std::pair<const char*, DType> kDTypes[] = {{"F32", f32}, {"F64", f64}, {"BF16", bf16}, {"F16", f16},
                                                     {"I64", i64}, {"I32", i32}, {"U8", u8},     {"BOOL", b8}};

const char* format_name(DType dtype) {
  return std::ranges::find(kDTypes, dtype, &std::pair<const char*, DType>::second)->first;
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

std::string read_header(InputFile& file) {
  file.check(file.size() >= static_cast<int64_t>(kLengthBytes), "truncated: a header has at least ", kLengthBytes,
             " bytes, but the file has ", file.size());
  uint64_t length = 0;
  file.read(&length, kLengthBytes);
  const std::string format = file.other_format();
  file.check(length <= kMaxHeader || format.empty(), "not a safetensors file", format);
  file.check(length <= kMaxHeader, "header length ", length, " exceeds ", kMaxHeader, " bytes");
  file.check_limit(static_cast<int64_t>(length), "the header");
  const int64_t available = file.size() - static_cast<int64_t>(kLengthBytes);
  file.check(static_cast<int64_t>(length) <= available, "header length ", length,
             " exceeds the rest of the file, which has ", in_bytes(available));
  std::string header(length, '\0');
  file.read(header.data(), header.size());
  file.check(header.starts_with('{'), "the header must begin with '{'", format);
  file.check(header[header.find_last_not_of(" \t\r\n")] == '}',
             "the header must end with '}', optionally followed by white space");
  // The JSON lexer would ignore everything after a zero byte.
  file.check(header.find('\0') == std::string::npos, "the header contains a zero byte");
  return header;
}

/// The description of a tensor.
struct Entry {
  DType dtype;
  Shape shape;
  int64_t begin;  ///< first byte, relative to the end of the header
  int64_t end;    ///< end of the byte range, relative to the end of the header
};

/// Converts the description of a tensor, and checks it without regard to the other tensors.
Entry read_entry(const InputFile& file, const std::string& what, const JsonValue& description) {
  std::map<std::string, const JsonValue*> fields{{"dtype", nullptr}, {"shape", nullptr}, {"data_offsets", nullptr}};
  for (const auto& [key, value] : description.items) {
    file.check(fields.contains(key), what, "unknown key ", in_quotes(key));
    file.check(fields[key] == nullptr, what, key, " occurs twice");
    const char* const type = key == "dtype" ? "a string" : "an array";
    file.check(value.type == type, what, key, " must be ", type, ", found ", value.type);
    for (const auto& [none, item] : value.items)
      file.check(item.integer.value_or(-1) >= 0, what, key, " must contain non-negative integers, found ", item.type);
    fields[key] = &value;
  }
  for (const auto& [key, value] : fields) file.check(value != nullptr, what, "needs dtype, shape and data_offsets");

  const std::string& dtype = fields["dtype"]->text;
  const auto* known = std::ranges::find(kDTypes, dtype, [](auto& entry) { return entry.first; });
  file.check(known != std::end(kDTypes), what, "dtype ", in_quotes(dtype), " is not supported");
  const auto& sizes = fields["shape"]->items;
  file.check(sizes.size() <= kMaxRank, what, "more than ", kMaxRank, " axes");
  const auto& offsets = fields["data_offsets"]->items;
  file.check(offsets.size() == 2, what, "data_offsets must be two numbers");
  Entry entry{
      .dtype = known->second, .shape = {}, .begin = *offsets[0].second.integer, .end = *offsets[1].second.integer};
  for (const auto& [none, size] : sizes) entry.shape.push_back(*size.integer);
  return entry;
}

struct Header {
  std::map<std::string, Entry> entries;
  Metadata metadata;
};

/// Converts the header. Throws unless the header consists of metadata and descriptions of tensors.
Header parse_header(const InputFile& file, const std::string& text) {
  Header header;
  bool has_metadata = false;
  for (const auto& [name, value] : read_json(file, "the header ", text).items) {
    const bool is_metadata = name == kMetadataKey;
    file.check(is_metadata ? !has_metadata : !header.entries.contains(name), "header entry ", in_quotes(name),
               " occurs twice");
    // The reference implementation also accepts null instead of metadata.
    file.check(value.type == "an object" || (is_metadata && value.type == "null"), "header entry ", in_quotes(name),
               " must be an object, found ", value.type);
    if (!is_metadata) {
      header.entries[name] = read_entry(file, tensor_named(name), value);
      continue;
    }
    has_metadata = true;
    for (const auto& [key, entry] : value.items) {
      file.check(entry.type == "a string", "metadata ", in_quotes(key), " must be a string, found ", entry.type);
      file.check(header.metadata.emplace(key, entry.text).second, "metadata ", in_quotes(key), " occurs twice");
    }
  }
  return header;
}

/// Throws unless the ranges of the tensors match their shapes and cover `bytes` bytes without gaps or overlaps.
void check_layout(const InputFile& file, const std::map<std::string, Entry>& entries, int64_t bytes) {
  std::multimap<std::pair<int64_t, int64_t>, std::string> names;  // by range, in the order of the data
  for (const auto& [name, entry] : entries) names.emplace(std::pair(entry.begin, entry.end), name);
  int64_t position = 0;
  for (const auto& [key, name] : names) {
    const auto& [dtype, shape, begin, end] = entries.at(name);
    const std::string what = tensor_named(name);
    const std::string range = concat("data_offsets [", begin, ", ", end, ']');
    file.check(begin <= end && end <= bytes, what, range, " do not lie within the data, which has ", in_bytes(bytes));
    const int64_t expected = claimed_bytes(file, what, shape, format_name(dtype), 8 * item_size(dtype));
    file.check(end - begin == expected, what, shape, ' ', format_name(dtype), " takes ", in_bytes(expected), ", but ",
               range, " contain ", end - begin);
    file.check(begin >= position, what, range, " overlap those of another tensor");
    file.check(begin == position, what, "the data has a gap at bytes ", position, " to ", begin,
               ", before this tensor");
    position = end;
  }
  file.check(position == bytes, "trailing bytes: the tensors take ", in_bytes(position), ", but the data has ", bytes);
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
  auto [entries, file_metadata] = parse_header(file, read_header(file));
  const int64_t data_begin = file.size() - file.remaining();
  check_layout(file, entries, file.remaining());
  file.check_limit(file.remaining(), "loading all tensors");
  const auto stored_checksum = file_metadata.extract(kChecksumKey);
  Checksum checksum;
  TensorMap tensors;
  for (const auto& [name, entry] : entries) {
    const Tensor tensor = file.tensor_at(data_begin + entry.begin, entry.shape, entry.dtype);
    if (tensor.dtype() == b8) check_bools(file, tensor_named(name), tensor);
    if (stored_checksum) checksum.add(name, tensor);
    tensors[name] = tensor.to(device);
  }
  if (stored_checksum) {
    const std::string found = checksum.text(file_metadata);
    file.check(found == stored_checksum.mapped(), "the file is damaged: its contents have the checksum ", found,
               ", but it was saved with ", in_quotes(stored_checksum.mapped()));
  }
  return {std::move(tensors), std::move(file_metadata), !stored_checksum.empty()};
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
