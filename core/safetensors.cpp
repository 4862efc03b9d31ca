// The header is read by a SAX handler, because a JSON document keeps only the last of two equal keys and
// so would hide a file that two readers understand differently.
#include "core/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "core/atomic_file.h"
#include "core/input_file.h"

namespace voxgrad {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors elements are little-endian");

constexpr int64_t kLongestHeader = 100'000'000;
constexpr size_t kLengthBytes = 8;
constexpr const char* kMetadataKey = "__metadata__";

struct DTypeName {
  const char* name;
  std::optional<DType> dtype;  ///< empty: of the format, but not of voxgrad
};
constexpr DTypeName kDTypes[] = {
    {"F32", f32},    {"F64", f64},    {"BF16", bf16},  {"F16", f16},    {"I64", i64},    {"I32", i32}, {"U8", u8},
    {"BOOL", b8},    {"U64", {}},     {"U32", {}},     {"U16", {}},     {"I16", {}},     {"I8", {}},   {"C64", {}},
    {"F8_E4M3", {}}, {"F8_E5M2", {}}, {"F8_E8M0", {}}, {"F6_E2M3", {}}, {"F6_E3M2", {}}, {"F4", {}},
};

const char* format_name(DType dtype) {
  return std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& entry) { return entry.dtype == dtype; })->name;
}

/// What the header says of one tensor.
struct Claim {
  std::optional<DType> dtype;
  std::optional<Shape> shape;
  std::optional<std::vector<int64_t>> offsets;
};

/// Takes the JSON of a header token by token and refuses whatever is not {name: claim} or metadata.
class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file) {}

  std::map<std::string, Claim> claims;
  Metadata metadata;

  // The interface of nlohmann::json_sax; returning true goes on, errors are thrown.
  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("a boolean"); }
  bool number_integer(int64_t) { unexpected("a negative number"); }
  bool number_float(double, const std::string&) { unexpected("a number that is no 64-bit integer"); }
  bool binary(std::vector<uint8_t>&) { unexpected("binary data"); }

  bool number_unsigned(uint64_t value) {
    if (place_ != Place::shape && place_ != Place::offsets) unexpected("a number");
    file_.check(value <= INT64_MAX, "tensor ", in_quotes(name_), ": ", field_, " ", value, " does not fit in 64 bits");
    if (place_ == Place::shape) {
      file_.check(claim_->shape->size() < kMaxRank, "tensor ", in_quotes(name_), ": more than ", kMaxRank, " axes");
      claim_->shape->push_back(static_cast<int64_t>(value));
    } else {
      file_.check(claim_->offsets->size() < 2, "tensor ", in_quotes(name_), ": data_offsets must be two numbers");
      claim_->offsets->push_back(static_cast<int64_t>(value));
    }
    return true;
  }

  bool string(const std::string& value) {
    if (place_ == Place::metadata) {
      metadata[field_] = value;
      return true;
    }
    if (place_ != Place::claim || field_ != "dtype") unexpected("a string");
    const auto* known =
        std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& entry) { return value == entry.name; });
    file_.check(known != std::end(kDTypes), "tensor ", in_quotes(name_), ": unknown dtype ", in_quotes(value));
    file_.check(known->dtype.has_value(), "tensor ", in_quotes(name_), ": dtype ", value, " is not supported");
    claim_->dtype = known->dtype;
    return true;
  }

  bool key(const std::string& key) {
    if (place_ == Place::names) {
      name_ = key;
      file_.check(names_.insert(key).second, "tensor ", in_quotes(key), " is there twice");
      return true;
    }
    field_ = key;
    if (place_ == Place::metadata) {
      file_.check(!metadata.contains(key), "metadata ", in_quotes(key), " is there twice");
      return true;
    }
    const bool known = key == "dtype" || key == "shape" || key == "data_offsets";
    file_.check(known, "tensor ", in_quotes(name_), ": unknown key ", in_quotes(key));
    const bool repeated = key == "dtype"   ? claim_->dtype.has_value()
                          : key == "shape" ? claim_->shape.has_value()
                                           : claim_->offsets.has_value();
    file_.check(!repeated, "tensor ", in_quotes(name_), ": ", key, " is there twice");
    return true;
  }

  bool start_object(size_t) {
    if (place_ == Place::outside) {
      place_ = Place::names;
    } else if (place_ != Place::names) {
      unexpected("an object");
    } else if (name_ == kMetadataKey) {
      place_ = Place::metadata;
    } else {
      place_ = Place::claim;
      claim_ = &claims[name_];
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::claim) {
      const bool complete = claim_->dtype && claim_->shape && claim_->offsets;
      file_.check(complete, "tensor ", in_quotes(name_), ": needs dtype, shape and data_offsets");
    }
    place_ = place_ == Place::names ? Place::outside : Place::names;
    return true;
  }

  bool start_array(size_t) {
    if (place_ != Place::claim || field_ == "dtype") unexpected("an array");
    if (field_ == "shape") {
      place_ = Place::shape;
      claim_->shape.emplace();
    } else {
      place_ = Place::offsets;
      claim_->offsets.emplace();
    }
    return true;
  }

  bool end_array() {
    const bool pair = place_ != Place::offsets || claim_->offsets->size() == 2;
    file_.check(pair, "tensor ", in_quotes(name_), ": data_offsets must be two numbers");
    place_ = Place::claim;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    file_.fail("the header is not valid JSON at byte ", position);
  }

 private:
  enum class Place { outside, names, metadata, claim, shape, offsets };

  [[noreturn]] void unexpected(const char* what) const {
    switch (place_) {
      case Place::metadata:
        file_.fail("metadata ", in_quotes(field_), " must be a string, found ", what);
      case Place::claim:
      case Place::shape:
      case Place::offsets:
        file_.fail("tensor ", in_quotes(name_), ": ", what, " is no valid ", field_);
      default:
        file_.fail("header entry ", in_quotes(name_), " must be an object, found ", what);
    }
  }

  const InputFile& file_;
  Place place_ = Place::outside;
  std::string name_;   // of the entry being read
  std::string field_;  // its key being read
  Claim* claim_ = nullptr;
  std::set<std::string> names_;
};

std::string read_header(InputFile& file) {
  file.check(file.size() >= static_cast<int64_t>(kLengthBytes), "truncated: ", file.size(), " bytes hold no header");
  uint64_t length = 0;
  file.read(&length, kLengthBytes);
  file.check(length <= kLongestHeader, "header length ", length, " exceeds ", kLongestHeader, " bytes");
  const int64_t available = file.size() - static_cast<int64_t>(kLengthBytes);
  file.check(static_cast<int64_t>(length) <= available, "header length ", length, " exceeds the ", available,
             " bytes that follow");
  std::string header(length, '\0');
  file.read(header.data(), header.size());
  file.check(header.starts_with('{'), "the header must begin with '{'");
  // Only spaces may pad it; the JSON lexer would take a zero byte for the end of the text.
  const size_t last = header.find_last_not_of(' ');
  file.check(header[last] == '}', "the header must end with '}' and spaces");
  file.check(header.find('\0') == std::string::npos, "the header holds a zero byte");
  return header;
}

using Entry = std::map<std::string, Claim>::value_type;

/// The claims in file order, if they tile `bytes` bytes exactly.
std::vector<const Entry*> checked_layout(const InputFile& file, const std::map<std::string, Claim>& claims,
                                         int64_t bytes) {
  std::vector<const Entry*> order;
  for (const Entry& entry : claims) order.push_back(&entry);
  std::stable_sort(order.begin(), order.end(),
                   [](const Entry* a, const Entry* b) { return *a->second.offsets < *b->second.offsets; });
  int64_t position = 0;
  for (const Entry* entry : order) {
    const auto& [name, claim] = *entry;
    const int64_t begin = (*claim.offsets)[0], end = (*claim.offsets)[1];
    file.check(begin <= end && end <= bytes, "tensor ", in_quotes(name), ": data_offsets [", begin, ", ", end,
               "] do not lie in the ", bytes, " bytes of data");
    const int64_t expected = claimed_bytes(file, *claim.shape, *claim.dtype);
    file.check(end - begin == expected, "tensor ", in_quotes(name), ": ", *claim.shape, " ", *claim.dtype, " takes ",
               expected, " bytes, data_offsets [", begin, ", ", end, "] hold ", end - begin);
    file.check(begin >= position, "tensor ", in_quotes(name), ": data_offsets [", begin, ", ", end,
               "] overlap those of another tensor");
    file.check(begin == position, "the data have a hole at bytes ", position, " to ", begin);
    position = end;
  }
  file.check(position == bytes, "trailing bytes: tensors take ", position, " bytes, the file holds ", bytes);
  return order;
}

/// The header's JSON, padded so that the data begin at a multiple of 8.
std::string write_header(const std::vector<std::pair<std::string, Tensor>>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  int64_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t end = position + tensor.numel() * item_size(tensor.dtype());
    header[name] = {{"dtype", format_name(tensor.dtype())},
                    {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
                    {"data_offsets", {position, end}}};
    position = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    fail("save_safetensors", "names and metadata must be UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  check(text.size() <= kLongestHeader, "save_safetensors", "the header would take ", text.size(), " bytes, at most ",
        kLongestHeader, " are allowed");
  return text;
}

}  // namespace

TensorMap load_safetensors(const std::filesystem::path& path, Device device, Metadata* metadata) {
  runtime(device).require(device.index);
  InputFile file(path, "load_safetensors");
  const std::string header = read_header(file);
  HeaderReader reader(file);
  nlohmann::json::sax_parse(header, &reader);
  const int64_t bytes = file.size() - static_cast<int64_t>(kLengthBytes + header.size());
  TensorMap tensors;
  for (const Entry* entry : checked_layout(file, reader.claims, bytes)) {
    const auto& [name, claim] = *entry;
    Tensor tensor = read_tensor(file, *claim.shape, contiguous_strides(*claim.shape), *claim.dtype);
    tensors[name] = device.is_cpu() ? tensor : tensor.to(device);
  }
  if (metadata != nullptr) *metadata = std::move(reader.metadata);
  return tensors;
}

void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata) {
  for (const auto& [name, tensor] : tensors) {
    check(tensor.defined(), "save_safetensors", "tensor ", in_quotes(name), " is undefined");
    check(name != kMetadataKey, "save_safetensors", "no tensor may be named ", kMetadataKey);
  }
  // Wide elements first: then all of them are aligned in the file, and can be mapped into memory.
  std::vector<std::pair<std::string, Tensor>> order(tensors.begin(), tensors.end());
  std::stable_sort(order.begin(), order.end(),
                   [](auto& a, auto& b) { return item_size(a.second.dtype()) > item_size(b.second.dtype()); });
  const std::string header = write_header(order, metadata);
  const uint64_t length = header.size();

  AtomicFile file(path, "save_safetensors");
  file.write(&length, kLengthBytes);
  file.write(header);
  for (const auto& [name, tensor] : order) {
    const Tensor host = tensor.detach().to(Device::cpu()).contiguous();
    file.write(host.raw_data(), static_cast<size_t>(host.numel() * item_size(host.dtype())));
  }
  file.commit();
}

}  // namespace voxgrad
