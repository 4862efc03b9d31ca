// Writes records with TFRecord framing (length, checksum of the length, bytes, checksum of the bytes). Each record
// contains a protobuf message Event. The code refers to the fields of a message by number. Comments give the names of
// the fields, which TensorBoard defines in tensorboard/compat/proto.
#include "nn/summary_writer.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <system_error>

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
  /// Appends a string or a nested message.
  Message& block(int field, std::string_view value) { return key(field, 2).varint(value.size()).append(value); }
  Message& block(int field, const Message& value) { return block(field, value.bytes); }

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
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0u);
  }
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
    write_event(3, "brain.Event:2", 0);                                          // file_version
    if (purge_step) write_event(7, Message().integer(1, 1).bytes, *purge_step);  // session_log: START
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

SummaryWriter::~SummaryWriter() { close(descriptor_); }

void SummaryWriter::fail_with(int error) const {
  fail(kOp, "cannot write '", path_.string(), "': ", std::generic_category().message(error));
}

void SummaryWriter::write_event(int field, const std::string& bytes, int64_t step) {
  const Message event = Message().number(1, seconds_now()).integer(2, step).block(field, bytes);
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

void SummaryWriter::write_value(const std::string& tag, const std::string& fields, int64_t step) {
  check(!tag.empty(), kOp, "the tag is empty");
  write_event(5, Message().block(1, Message().block(1, tag).bytes + fields).bytes, step);  // summary: value
}

void SummaryWriter::add_scalar(const std::string& tag, double value, int64_t step) {
  write_value(tag, Message().number(2, static_cast<float>(value)).bytes, step);  // simple_value
}

void SummaryWriter::add_image(const std::string& tag, const Tensor& image, int64_t step) {
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
  write_value(tag, Message().block(4, encoded).bytes, step);  // image
}

void SummaryWriter::flush() {
  if (fsync(descriptor_) != 0) fail_with(errno);
}

}  // namespace voxgrad
