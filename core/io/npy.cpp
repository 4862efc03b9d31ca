// Reads and writes .npy files. The header of a file is a Python literal, which is never evaluated: a parser accepts
// only the form that NumPy writes.
#include "core/io/npy.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <initializer_list>
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
  std::string_view code;
  DType dtype;
};
constexpr TypeCode kTypeCodes[] = {{"f4", f32}, {"f8", f64}, {"f2", f16}, {"i8", i64},
                                   {"i4", i32}, {"u1", u8},  {"b1", b8}};

struct Header {
  std::string descr;
  bool fortran_order = false;
  Shape shape;
};

/// Parses a header in the form that NumPy writes, with any white space between the tokens:
/// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
Header parse_header(const InputFile& file, std::string_view text) {
  std::string_view rest = text;
  const auto accept = [&](std::string_view token) {
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t\r\n"), rest.size()));
    const bool found = rest.starts_with(token);
    if (found) rest.remove_prefix(token.size());
    return found;
  };
  const auto expect = [&](std::initializer_list<std::string_view> tokens) {
    for (const std::string_view token : tokens)
      file.check(accept(token), "malformed header: expected ", token, " at byte ", text.size() - rest.size(), " of ",
                 in_quotes(text));
  };
  Header header;
  expect({"{", "'descr'", ":"});
  file.check(!accept("[") && !accept("("), "structured dtypes are not supported");
  expect({"'"});
  header.descr = rest.substr(0, rest.find('\''));
  rest.remove_prefix(header.descr.size());
  expect({"'", ",", "'fortran_order'", ":"});
  header.fortran_order = accept("True");
  if (!header.fortran_order) expect({"False"});
  expect({",", "'shape'", ":", "("});
  while (!accept(")")) {
    file.check(header.shape.size() < kMaxRank, "more than ", kMaxRank, " axes");
    int64_t size = -1;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), size);
    file.check(error == std::errc() && size >= 0,
               "a size in the shape is not an integer from 0 to 2^63 - 1: ", in_quotes(rest));
    rest.remove_prefix(static_cast<size_t>(end - rest.data()));
    header.shape.push_back(size);
    const bool is_last = header.shape.size() > 1 && accept(")");
    if (is_last) break;
    expect({","});
  }
  accept(",");
  expect({"}"});
  accept("");
  file.check(rest.empty(), "unexpected text after the dict of the header");
  return header;
}

/// Reads the text of the header, and leaves the file at the position of the first element.
std::string read_header(InputFile& file) {
  char magic[8];  // including the version
  file.check(file.size() >= 10, "truncated: a .npy header has at least 10 bytes, but the file has ", file.size());
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
  file.check(length <= available, "truncated: header length ", length, " exceeds the rest of the file, which has ",
             in_bytes(available));
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
  const auto* known = std::ranges::find(kTypeCodes, code, &TypeCode::code);
  file.check(known != std::end(kTypeCodes), "dtype ", in_quotes(descr),
             " is not supported; the supported dtypes are f2, f4, f8, i4, i8, u1 and b1");
  const bool one_byte = item_size(known->dtype) == 1;
  const std::string_view orders = one_byte ? "|<>=" : "<>=";
  const char order = descr[0];
  file.check(orders.find(order) != std::string_view::npos, "dtype ", in_quotes(descr), " has no valid byte order");
  return {known->dtype, !one_byte && order != '=' && order != kNativeOrder};
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
  const auto [descr, fortran_order, shape] = parse_header(file, text);
  const ElementType type = parse_type(file, descr);
  const DType dtype = type.dtype;
  const int64_t expected = claimed_bytes(file, "", shape, name(dtype), 8 * item_size(dtype));
  const int64_t held = file.remaining();
  file.check(held >= expected, "truncated: ", shape, " ", dtype, " takes ", in_bytes(expected), ", but the file has ",
             held);
  file.check(held == expected, "trailing bytes: ", shape, " ", dtype, " takes ", in_bytes(expected),
             ", but the file has ", held);
  return {type, shape, fortran_order, file.size() - held};
}

/// An open file with a valid header.
struct OpenNpy {
  OpenNpy(const std::filesystem::path& path, const char* op, const NpyOptions& options)
      : file(path, op, options.max_bytes), layout(read_layout(file)) {}
  /// Returns a contiguous tensor of the elements start .. start + size, which must lie within the shape. If `maps` is
  /// true, these elements must be the whole array, and the tensor is a memory map. Exceptions are arrays in Fortran
  /// order, and files whose byte order is not that of the machine.
  Tensor read(const Dims& start, const Shape& size, bool maps) const;

  InputFile file;
  Layout layout;
};

/// Splits a part of a row-major array into runs of elements that are adjacent in the array and in the part. Calls
/// run(first element in the array, first element in the part, count) for each run. If the part is the
/// whole array, the array may also be a scalar or empty.
template <class Run>
void for_each_run(const Shape& shape, const Dims& start, const Shape& size, Run run) {
  if (shape.empty()) return run(0, 0, 1);
  int64_t axis = shape.size() - 1;  // the outermost axis within a run: the part contains all later axes completely
  int64_t count = size[axis];
  for (; axis > 0 && size[axis] == shape[axis]; --axis) count *= size[axis - 1];
  const Strides strides = contiguous_strides(shape);
  for (int64_t part = 0, total = numel(size); part < total; part += count) {
    int64_t first = start[axis] * strides[axis], rest = part / count;
    for (int64_t i = axis - 1; i >= 0; rest /= size[i--]) first += (start[i] + rest % size[i]) * strides[i];
    run(first, part, count);
  }
}

Tensor OpenNpy::read(const Dims& start, const Shape& size, bool maps) const {
  const DType dtype = layout.type.dtype;
  const int64_t item = item_size(dtype);
  file.check_limit(numel(size) * item, size, ' ', dtype);
  Shape whole = layout.shape, part = size;
  Dims first = start;
  if (layout.fortran_order)  // equivalent to row-major order with reversed axes
    for (Dims* dims : {&whole, &part, &first}) std::reverse(dims->begin(), dims->end());
  Tensor tensor;
  if (maps && !layout.type.swapped) {
    tensor = file.tensor_at(layout.offset, part, dtype);
  } else {
    tensor = empty(part, {.dtype = dtype});
    auto* data = static_cast<char*>(tensor.mutable_raw_data());
    for_each_run(whole, first, part, [&](int64_t from, int64_t to, int64_t count) {
      file.read_at(layout.offset + from * item, data + to * item, static_cast<size_t>(count * item));
    });
    if (layout.type.swapped) swap_bytes(data, item, tensor.numel());
  }
  if (dtype == b8) check_bools(file, "", tensor);
  if (!layout.fortran_order) return tensor;
  Dims order;
  for (int64_t axis = tensor.dim(); axis-- > 0;) order.push_back(axis);
  return tensor.permute(order).contiguous();
}

}  // namespace

Tensor load_npy(const std::filesystem::path& path, Device device, const NpyOptions& options) {
  runtime(device).require(device.index);
  const OpenNpy npy(path, "load_npy", options);
  return npy.read(Dims::filled(npy.layout.shape.size(), 0), npy.layout.shape, true).to(device);
}

struct NpyFile::Body : OpenNpy {
  using OpenNpy::OpenNpy;
};

NpyFile::NpyFile(const std::filesystem::path& path, const NpyOptions& options)
    : body_(std::make_shared<const Body>(path, "NpyFile", options)) {}

const Shape& NpyFile::shape() const { return body_->layout.shape; }
DType NpyFile::dtype() const { return body_->layout.type.dtype; }

Tensor NpyFile::read(const Dims& start, const Shape& size) const {
  const Shape& shape = this->shape();
  bool within = start.size() == shape.size() && size.size() == shape.size() && !shape.empty();
  for (int64_t i = 0; within && i < shape.size(); ++i)
    within = start[i] >= 0 && size[i] > 0 && size[i] <= shape[i] && start[i] <= shape[i] - size[i];
  body_->file.check(within, "a part of size ", size, " at ", start, " does not lie within ", shape);
  return body_->read(start, size, false);
}

void save_npy(const std::filesystem::path& path, const Tensor& tensor) {
  check(tensor.defined(), "save_npy", "the tensor is undefined");
  const auto* type = std::ranges::find(kTypeCodes, tensor.dtype(), &TypeCode::dtype);
  check(type != std::end(kTypeCodes), "save_npy", "NumPy has no ", tensor.dtype(), "; convert the tensor to f32 first");
  const char order = item_size(type->dtype) == 1 ? '|' : kNativeOrder;
  std::string text = concat("{'descr': '", order, type->code, "', 'fortran_order': False, 'shape': (");
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
