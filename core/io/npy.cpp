// The header is a Python literal. It is never evaluated: a parser accepts only the form that NumPy writes.
#include "core/io/npy.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "core/detail/divide.h"
#include "core/io/atomic_file.h"
#include "core/io/detail/input_file.h"

namespace voxgrad {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
// Maximum length of the header in bytes. Only headers of structured dtypes, which are not supported, are longer.
// NumPy's default limit is 10,000 bytes.
constexpr uint32_t kMaxHeader = 65'535;
constexpr char kNativeOrder = std::endian::native == std::endian::little ? '<' : '>';

struct TypeCode {
  const char* code;
  DType dtype;
};
constexpr TypeCode kTypeCodes[] = {{"f4", f32}, {"f8", f64}, {"f2", f16}, {"i8", i64},
                                   {"i4", i32}, {"u1", u8},  {"b1", b8}};

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<Shape> shape;
};

/// Parses a header such as {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class HeaderParser {
 public:
  HeaderParser(const InputFile& file, std::string_view text) : file_(file), text_(text) {}

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = parse_string();
      expect(':');
      if (key == "descr") {
        set(key, header.descr, parse_descr());
      } else if (key == "fortran_order") {
        set(key, header.fortran_order, parse_bool());
      } else if (key == "shape") {
        set(key, header.shape, parse_shape());
      } else {
        file_.fail("unknown header key ", in_quotes(key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    file_.check(position_ == text_.size(), "unexpected text after the dict of the header");
    file_.check(header.descr && header.fortran_order && header.shape,
                "the header must contain descr, fortran_order and shape");
    return header;
  }

 private:
  template <class T>
  void set(const std::string& key, std::optional<T>& field, T value) {
    file_.check(!field.has_value(), "header key '", key, "' occurs twice");
    field = std::move(value);
  }

  void skip_space() { position_ = std::min(text_.find_first_not_of(" \t\r\n", position_), text_.size()); }
  char peek() {
    skip_space();
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  bool accept(char wanted) {
    const bool found = peek() == wanted && position_ < text_.size();
    position_ += found;
    return found;
  }
  void expect(char wanted) {
    file_.check(accept(wanted), "malformed header: expected '", wanted, "' at byte ", position_, " of ",
                in_quotes(text_));
  }

  std::string parse_string() {
    const char quote = peek();
    const size_t end = quote == '\'' || quote == '"' ? text_.find(quote, position_ + 1) : std::string_view::npos;
    file_.check(end != std::string_view::npos, "malformed header: expected a string at byte ", position_, " of ",
                in_quotes(text_));
    const std::string value(text_.substr(position_ + 1, end - position_ - 1));
    position_ = end + 1;
    return value;
  }

  std::string parse_descr() {
    file_.check(peek() != '[' && peek() != '(', "structured dtypes are not supported");
    return parse_string();
  }

  bool parse_bool() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (!text_.substr(position_).starts_with(word)) continue;
      position_ += word.size();
      return value;
    }
    file_.fail("fortran_order must be True or False");
  }

  Shape parse_shape() {
    Shape shape;
    expect('(');
    while (!accept(')')) {
      file_.check(shape.size() < kMaxRank, "more than ", kMaxRank, " axes");
      shape.push_back(parse_size());
      if (accept(',')) continue;
      file_.check(shape.size() > 1 || peek() != ')', "shape must be a tuple: (", shape[0], ",), not (", shape[0], ")");
      expect(')');
      break;
    }
    return shape;
  }

  int64_t parse_size() {
    skip_space();
    const size_t end = std::min(text_.find_first_of(",() \t\r\n", position_), text_.size());
    const std::string_view word = text_.substr(position_, end - position_);
    int64_t value = -1;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    const bool whole = stop == word.data() + word.size() && (word.size() == 1 || !word.starts_with('0'));
    file_.check(!word.empty(), "a size is missing in the shape in header ", in_quotes(text_));
    file_.check(whole && error != std::errc::invalid_argument, "a size in the shape must be an integer, got ",
                in_quotes(word));
    file_.check(!word.starts_with('-'), "a size in the shape must not be negative, got ", in_quotes(word));
    file_.check(error == std::errc(), "a size in the shape does not fit in 64 bits: ", in_quotes(word));
    position_ = end;
    return value;
  }

  const InputFile& file_;
  std::string_view text_;
  size_t position_ = 0;
};

/// Reads the text of the header, and leaves the file at the position of the first element.
std::string read_header(InputFile& file) {
  char magic[8];  // including the version
  file.check(file.size() >= 10, "truncated: ", file.size(), " bytes are too few for a .npy header");
  file.read(magic, sizeof(magic));
  file.check(std::string_view(magic, 6) == kMagic, "not a .npy file: the magic string is missing", file.other_format());
  const int major = static_cast<unsigned char>(magic[6]), minor = static_cast<unsigned char>(magic[7]);
  file.check(major >= 1 && major <= 3 && minor == 0, "unknown version ", major, ".", minor, " of the .npy format");
  unsigned char bytes[4] = {};
  const size_t length_bytes = major == 1 ? 2 : 4;
  file.read(bytes, length_bytes);
  const uint32_t length = bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
  file.check(length <= kMaxHeader, "header length ", length, " exceeds ", kMaxHeader, " bytes");
  const int64_t available = file.size() - static_cast<int64_t>(sizeof(magic) + length_bytes);
  file.check(length <= available, "truncated: header length ", length, " exceeds the ", available,
             " bytes that follow");
  std::string text(length, '\0');
  file.read(text.data(), text.size());
  return text;
}

struct ElementType {
  DType dtype;
  bool swapped;
};

ElementType parse_type(const InputFile& file, const std::string& descr) {
  file.check(descr.find('O') == std::string::npos,
             "object arrays contain pickled Python objects, which are not supported");
  const std::string_view code = std::string_view(descr).substr(std::min<size_t>(descr.size(), 1));
  const auto* known =
      std::find_if(std::begin(kTypeCodes), std::end(kTypeCodes), [&](auto& entry) { return entry.code == code; });
  file.check(known != std::end(kTypeCodes), "dtype ", in_quotes(descr),
             " is not supported; the supported dtypes are f2, f4, f8, i4, i8, u1 and b1");
  const bool one_byte = item_size(known->dtype) == 1;
  const std::string_view orders = one_byte ? "|<>=" : "<>=";
  const char order = descr[0];
  file.check(orders.find(order) != std::string_view::npos, "dtype ", in_quotes(descr), " has no valid byte order");
  return {known->dtype, !one_byte && order != '=' && order != kNativeOrder};
}

void swap_bytes(Tensor& tensor) {
  const int64_t size = item_size(tensor.dtype());
  auto* data = static_cast<char*>(tensor.mutable_raw_data());
  for (int64_t i = 0; i < tensor.numel(); ++i) std::reverse(data + i * size, data + (i + 1) * size);
}

const char* type_code(DType dtype) {
  const auto* known =
      std::find_if(std::begin(kTypeCodes), std::end(kTypeCodes), [&](auto& entry) { return entry.dtype == dtype; });
  check(known != std::end(kTypeCodes), "save_npy", "NumPy has no ", dtype, "; convert the tensor to f32 first");
  return known->code;
}

/// The checked contents of the header.
struct Layout {
  ElementType type;
  Shape shape;
  bool fortran_order;
  int64_t offset;  ///< bytes before the first element
};

Layout read_layout(InputFile& file) {
  const std::string text = read_header(file);
  const Header header = HeaderParser(file, text).parse();
  const ElementType type = parse_type(file, *header.descr);
  const DType dtype = type.dtype;
  const Shape& shape = *header.shape;
  const int64_t expected = claimed_bytes(file, "", shape, name(dtype), 8 * item_size(dtype));
  const int64_t held = file.remaining();
  file.check(held >= expected, "truncated: ", shape, " ", dtype, " takes ", expected, " bytes, but the file has ",
             held);
  file.check(held == expected, "trailing bytes: ", shape, " ", dtype, " takes ", expected, " bytes, but the file has ",
             held);
  return {type, shape, *header.fortran_order, file.size() - held};
}

/// An open file with a valid header.
struct OpenNpy {
  OpenNpy(const std::filesystem::path& path, const char* op, const NpyOptions& options)
      : file(path, op, options.max_bytes), layout(read_layout(file)) {}
  Tensor read(const Dims& start, const Shape& size) const;

  InputFile file;
  Layout layout;
};

/// Returns a contiguous tensor of the elements start .. start + size, which must lie within the shape.
Tensor OpenNpy::read(const Dims& start, const Shape& size) const {
  const DType dtype = layout.type.dtype;
  const int64_t item = item_size(dtype);
  file.check_limit(numel(size) * item, size, ' ', dtype);
  Shape whole = layout.shape, part = size;
  Dims first = start, order;
  if (layout.fortran_order)  // equivalent to row-major order with reversed axes
    for (Dims* dims : {&whole, &part, &first}) std::reverse(dims->begin(), dims->end());
  Tensor tensor = empty(part, {.dtype = dtype});
  auto* data = static_cast<char*>(tensor.mutable_raw_data());
  for_each_run(whole, first, part, [&](int64_t from, int64_t to, int64_t count) {
    file.read_at(layout.offset + from * item, data + to * item, static_cast<size_t>(count * item));
  });
  if (layout.type.swapped) swap_bytes(tensor);
  if (dtype == b8) check_bools(file, "", tensor);
  if (!layout.fortran_order) return tensor;
  for (int64_t axis = size.size(); axis-- > 0;) order.push_back(axis);
  return tensor.permute(order).contiguous();
}

}  // namespace

Tensor load_npy(const std::filesystem::path& path, Device device, const NpyOptions& options) {
  runtime(device).require(device.index);
  const OpenNpy open(path, "load_npy", options);
  const Shape& shape = open.layout.shape;
  return open.read(Dims::filled(shape.size(), 0), shape).to(device);
}

struct NpyFile::Body : OpenNpy {
  using OpenNpy::OpenNpy;
};

NpyFile::NpyFile(const std::filesystem::path& path, const NpyOptions& options)
    : body_(std::make_shared<const Body>(path, "NpyFile", options)) {}

const Shape& NpyFile::shape() const { return body_->layout.shape; }
DType NpyFile::dtype() const { return body_->layout.type.dtype; }

Tensor NpyFile::read(const Dims& start, const Shape& size) const {
  check_part(body_->file, shape(), start, size);
  return body_->read(start, size);
}

void save_npy(const std::filesystem::path& path, const Tensor& tensor) {
  check(tensor.defined(), "save_npy", "the tensor is undefined");
  const char order = item_size(tensor.dtype()) == 1 ? '|' : kNativeOrder;
  std::string text = concat("{'descr': '", order, type_code(tensor.dtype()), "', 'fortran_order': False, 'shape': (");
  for (int64_t size : tensor.shape()) text += concat(size, tensor.dim() == 1 ? "," : ", ");
  if (tensor.dim() > 1) text.resize(text.size() - 2);
  text += "), }";
  // As in NumPy, the header ends with a newline, and the elements begin at a multiple of 64 bytes.
  constexpr size_t kPrefix = 10, kAlignment = 64;
  const size_t total = round_up(kPrefix + text.size() + 1, kAlignment);
  text.resize(total - kPrefix - 1, ' ');
  text += '\n';

  const Tensor host = tensor.detach().to(Device::cpu()).contiguous();
  AtomicFile file(path, "save_npy");
  file.write(kMagic);
  const char version_and_length[] = {1, 0, static_cast<char>(text.size() & 0xff), static_cast<char>(text.size() >> 8)};
  file.write(version_and_length, sizeof(version_and_length));
  file.write(text);
  file.write(host.raw_data(), static_cast<size_t>(host.numel() * item_size(host.dtype())));
  file.commit();
}

}  // namespace voxgrad
