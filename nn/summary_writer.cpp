// Writes records with TFRecord framing (length, checksum of the length, bytes, checksum of the bytes). Each record
// contains a protobuf message Event. The fields are written by number; comments give their names, which TensorBoard
// defines in tensorboard/compat/proto and plugins/hparams.
#include "nn/summary_writer.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <string_view>
#include <system_error>
#include <vector>

#include "ops/elementwise.h"

namespace voxgrad {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written in the byte order of the machine");
constexpr const char* kOp = "SummaryWriter";

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

/// A protobuf message (https://protobuf.dev/programming-guides/encoding), written field by field.
struct Message {
  std::string bytes;

  /// Appends a varint.
  Message& integer(int field, int64_t value) { return key(field, 0).varint(static_cast<uint64_t>(value)); }
  /// Appends a double or a float.
  Message& number(int field, double value) { return key(field, 1).append(bytes_of(value)); }
  Message& number(int field, float value) { return key(field, 5).append(bytes_of(value)); }
  /// Appends a text, a message or packed numbers.
  Message& block(int field, std::string_view value) { return key(field, 2).varint(value.size()).append(value); }
  Message& block(int field, const Message& value) { return block(field, value.bytes); }
  Message& block(int field, const std::vector<double>& values) {
    return block(field, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
  }

 private:
  Message& append(std::string_view text) {
    bytes += text;
    return *this;
  }
  Message& varint(uint64_t value) {
    for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
    bytes += static_cast<char>(value);
    return *this;
  }
  Message& key(int field, int type) { return varint(static_cast<uint64_t>(field << 3 | type)); }
};

/// Returns the masked CRC-32C that TFRecord uses. Its polynomial (Castagnoli) differs from zlib's.
uint32_t masked_crc(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      table[i] = i;
      for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0x82f63b78u : 0u);
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 255] ^ crc >> 8;
  return std::rotr(~crc, 15) + 0xa282ead8u;
}

void append_big_endian(std::string& to, uint64_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) to += static_cast<char>(value >> shift);
}

/// Returns a chunk of a PNG file: length, type, data and checksum.
std::string png_chunk(const std::string& type, const std::string& data) {
  std::string chunk;
  append_big_endian(chunk, data.size());
  chunk += type + data;
  append_big_endian(chunk, crc32_z(0, reinterpret_cast<const Bytef*>(chunk.data()) + 4, chunk.size() - 4));
  return chunk;
}

/// Encodes contiguous u8 pixels (H, W, C) as a PNG file (https://www.w3.org/TR/png).
std::string encode_png(const Tensor& pixels) {
  const int64_t row_bytes = pixels.size(1) * pixels.size(2);
  constexpr std::array<char, 5> kColorTypes{0, 0, 0, 2, 6};
  std::string header, rows;
  append_big_endian(header, static_cast<uint64_t>(pixels.size(1)));
  append_big_endian(header, static_cast<uint64_t>(pixels.size(0)));
  header += {8, kColorTypes[static_cast<size_t>(pixels.size(2))], 0, 0, 0};
  for (int64_t y = 0; y < pixels.size(0); ++y) {
    rows += '\0';  // no filter
    rows.append(reinterpret_cast<const char*>(pixels.data<uint8_t>() + y * row_bytes), static_cast<size_t>(row_bytes));
  }
  uLongf packed_bytes = compressBound(rows.size());
  std::string packed(packed_bytes, '\0');
  const int result = compress(reinterpret_cast<Bytef*>(packed.data()), &packed_bytes,
                              reinterpret_cast<const Bytef*>(rows.data()), rows.size());
  check(result == Z_OK, kOp, "zlib cannot compress an image: ", zError(result));
  packed.resize(packed_bytes);
  return "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header) + png_chunk("IDAT", packed) + png_chunk("IEND", "");
}

/// Returns a SummaryMetadata message, which assigns a summary to the TensorBoard plugin `name`.
Message plugin(std::string_view name, const Message& content = {}) {
  return Message().block(1, Message().block(1, name).block(2, content));
}

/// Returns the upper limits of a histogram's buckets.
const std::vector<double>& bucket_limits() {
  static const std::vector<double> limits = [] {
    std::vector<double> positive, all;
    for (double v = 1e-12; v < 1e20; v *= 1.1) positive.push_back(v);
    for (size_t i = positive.size(); i-- > 0;) all.push_back(-positive[i]);
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    return all;
  }();
  return limits;
}

/// Returns a HistogramProto message of the finite values.
Message histogram(const std::vector<double>& values) {
  const std::vector<double>& limits = bucket_limits();
  std::vector<double> counts(limits.size());
  double low = INFINITY, high = -INFINITY, count = 0, sum = 0, squares = 0;
  for (const double v : values) {
    if (!std::isfinite(v)) continue;
    const auto bucket = std::upper_bound(limits.begin(), limits.end() - 1, v) - limits.begin();
    ++counts[static_cast<size_t>(bucket)];
    low = std::min(low, v), high = std::max(high, v);
    ++count, sum += v, squares += v * v;
  }
  if (count == 0) low = high = 0;
  const auto some = [](double n) { return n > 0; };
  // Keep the buckets from the first to the last one with values, and the empty bucket before them: the upper limit of
  // the empty bucket is the lower limit of the first bucket with values.
  auto first = std::find_if(counts.begin(), counts.end(), some) - counts.begin();
  auto last = counts.rend() - std::find_if(counts.rbegin(), counts.rend(), some);
  if (count == 0) first = 0, last = 1;
  first = std::max<std::ptrdiff_t>(first - 1, 0);
  return Message()
      .number(1, low)
      .number(2, high)
      .number(3, count)
      .number(4, sum)
      .number(5, squares)
      .block(6, std::vector<double>(limits.begin() + first, limits.begin() + last))
      .block(7, std::vector<double>(counts.begin() + first, counts.begin() + last));
}

/// A google.protobuf.Value message, and its DataType in TensorBoard's hparams plugin.
struct HParamValue {
  Message value;
  int64_t type;
};
HParamValue encode(const SummaryWriter::HParams::mapped_type& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return {Message().block(3, *text), 1};
  if (const auto* flag = std::get_if<bool>(&value)) return {Message().integer(4, *flag), 2};
  const auto* whole = std::get_if<int64_t>(&value);
  return {Message().number(2, whole ? static_cast<double>(*whole) : std::get<double>(value)), 3};
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

SummaryWriter::SummaryWriter(const std::filesystem::path& log_dir, std::optional<int64_t> purge_step) {
  std::error_code error;
  std::filesystem::create_directories(log_dir, error);
  check(!error, kOp, "cannot create the folder '", log_dir.string(), "': ", error.message());
  const std::string stem = concat("events.out.tfevents.", static_cast<int64_t>(seconds_now()), '.', getpid(), '.');
  for (int number = 0; descriptor_ < 0; ++number) {
    path_ = log_dir / concat(stem, number);
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST && errno != EINTR) fail_with(errno);
  }
  try {
    write_event(3, "brain.Event:2", 0, {});                                          // file_version
    if (purge_step) write_event(7, Message().integer(1, 1).bytes, *purge_step, {});  // session_log: START
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

SummaryWriter::~SummaryWriter() { close(descriptor_); }

void SummaryWriter::fail_with(int error) const {
  fail(kOp, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

void SummaryWriter::write_event(int field, const std::string& bytes, int64_t step, WallTime wall_time) {
  const Message event = Message().number(1, wall_time.value_or(seconds_now())).integer(2, step).block(field, bytes);
  std::string record(bytes_of(uint64_t{event.bytes.size()}));
  record += bytes_of(masked_crc(record));
  record += event.bytes;
  record += bytes_of(masked_crc(event.bytes));
  for (size_t done = 0; done < record.size();) {
    const ssize_t written = ::write(descriptor_, record.data() + done, record.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : ENOSPC;
      // Removes the incomplete record, because readers would stop at it.
      if (ftruncate(descriptor_, size_) != 0) fail(kOp, "'", path_.string(), "' ends with an incomplete record");
      fail_with(error);
    }
    done += static_cast<size_t>(written);
  }
  size_ += static_cast<int64_t>(record.size());
}

void SummaryWriter::write_value(const std::string& tag, const std::string& fields, int64_t step, WallTime wall_time) {
  check(!tag.empty(), kOp, "the tag is empty");
  write_event(5, Message().block(1, Message().block(1, tag).bytes + fields).bytes, step, wall_time);  // summary: value
}

void SummaryWriter::add_scalar(const std::string& tag, double value, int64_t step, WallTime wall_time) {
  write_value(tag, Message().number(2, static_cast<float>(value)).bytes, step, wall_time);  // simple_value
}

void SummaryWriter::add_image(const std::string& tag, const Tensor& image, int64_t step, WallTime wall_time) {
  const bool gray = image.defined() && image.dim() == 2;
  const int64_t channels = gray ? 1 : image.defined() && image.dim() == 3 ? image.size(0) : 0;
  check((channels == 1 || channels == 3 || channels == 4) && image.numel() > 0, kOp, "add_image '", tag,
        "': expected (H, W), or (C, H, W) with 1, 3 or 4 channels, got ", describe(image));
  check(image.numel() <= 1 << 30, kOp, "add_image '", tag, "': the image is too large: ", describe(image));
  check(is_floating(image.dtype()) || image.dtype() == u8 || image.dtype() == b8, kOp, "add_image '", tag,
        "': expected floats, u8 or bool, got ", describe(image));
  Tensor pixels = image.detach();
  if (pixels.dtype() != u8) pixels = affine(pixels.to(f32), 255, 0).to(u8);  // the conversion to u8 clamps
  pixels = (gray ? pixels.unsqueeze(0) : pixels).to(Device::cpu()).permute({1, 2, 0}).contiguous();
  const Message encoded =
      Message().integer(1, pixels.size(0)).integer(2, pixels.size(1)).integer(3, channels).block(4, encode_png(pixels));
  write_value(tag, Message().block(4, encoded).bytes, step, wall_time);  // image
}

void SummaryWriter::add_histogram(const std::string& tag, const Tensor& values, int64_t step, WallTime wall_time) {
  check(values.defined() && values.numel() > 0, kOp, "add_histogram '", tag,
        "': the tensor has no elements: ", describe(values));
  write_value(tag, Message().block(5, histogram(values.to_vector())).bytes, step, wall_time);  // histo
}

void SummaryWriter::add_text(const std::string& tag, const std::string& text, int64_t step, WallTime wall_time) {
  const Message shape = Message().block(2, Message().integer(1, 1));
  const Message tensor = Message().integer(1, 7).block(2, shape).block(8, text);  // DT_STRING
  write_value(tag + "/text_summary", Message().block(8, tensor).block(9, plugin("text")).bytes, step, wall_time);
}

void SummaryWriter::add_hparams(const HParams& hparams, const std::map<std::string, double>& metrics, int64_t step,
                                WallTime wall_time) {
  Message experiment, start;
  for (const auto& [name, value] : hparams) {
    const HParamValue encoded = encode(value);
    experiment.block(4, Message().block(1, name).integer(4, encoded.type));
    start.block(1, Message().block(1, name).block(2, encoded.value));
  }
  for (const auto& [tag, value] : metrics) experiment.block(5, Message().block(1, Message().block(2, tag)));
  const auto write = [&](const char* tag, int field, const Message& content) {
    const Message data = Message().integer(1, 0).block(field, content);  // version, and one of the three fields below
    write_value(tag, Message().block(9, plugin("hparams", data)).bytes, step, wall_time);
  };
  write("_hparams_/experiment", 2, experiment);
  write("_hparams_/session_start_info", 3, start);
  write("_hparams_/session_end_info", 4, Message().integer(1, 1));  // status: SUCCESS
  for (const auto& [tag, value] : metrics) add_scalar(tag, value, step, wall_time);
}

void SummaryWriter::flush() {
  if (fsync(descriptor_) != 0) fail_with(errno);
}

}  // namespace voxgrad
