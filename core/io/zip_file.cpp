// Implements the reader of the directory of a zip archive, including zip64.
#include "core/io/detail/zip_file.h"

#include <algorithm>
#include <cstring>

namespace voxgrad {
namespace {

using namespace std::string_view_literals;

constexpr size_t kEndBytes = 22, kMaxComment = 65'535;  // the end record and the comment that follows it
constexpr size_t kLocatorBytes = 20, kEnd64Bytes = 56;
constexpr size_t kEntryBytes = 46, kLocalHeaderBytes = 30;
constexpr int64_t kMaxDirectory = 256'000'000;
constexpr uint64_t kIn64Bits = 0xffff'ffff;  // the value is in the extra field instead

/// Returns the little-endian integer at `position`, which must lie within `record`.
template <class T>
uint64_t get(std::string_view record, size_t position) {
  T value;
  std::memcpy(&value, record.data() + position, sizeof(T));
  return value;
}

/// Replaces each value that is kIn64Bits by the next 64-bit value of the zip64 extra field. Returns false if the field
/// is missing or too short.
bool read_zip64(std::string_view extra, std::initializer_list<uint64_t*> values) {
  const auto large = [](const uint64_t* value) { return *value == kIn64Bits; };
  if (std::none_of(values.begin(), values.end(), large)) return true;
  while (extra.size() >= 4) {
    const size_t size = get<uint16_t>(extra, 2);
    if (size > extra.size() - 4) return false;
    std::string_view field = extra.substr(4, size);
    if (get<uint16_t>(extra, 0) != 1) {
      extra.remove_prefix(4 + size);
      continue;
    }
    for (uint64_t* value : values) {
      if (!large(value)) continue;
      if (field.size() < 8) return false;
      *value = get<uint64_t>(field, 0);
      field.remove_prefix(8);
    }
    return true;
  }
  return false;
}

}  // namespace

ZipFile::ZipFile(const InputFile& file) : file_(file) {
  char magic[4] = {};
  file.read_at(0, magic, std::min<size_t>(4, static_cast<size_t>(file.size())));
  file.check("PK\x03\x04"sv == std::string_view(magic, 4), "not a zip archive, as torch.save writes since PyTorch 1.6",
             file.other_format());
  uint64_t count = 0;
  const Range range = find_directory(count);
  file.check(range.size <= kMaxDirectory, "the directory of the zip archive exceeds ", kMaxDirectory, " bytes");
  std::string directory(static_cast<size_t>(range.size), '\0');
  file.read_at(range.position, directory.data(), directory.size());
  std::string_view rest = directory;
  for (; count > 0; --count) rest.remove_prefix(add_entry(rest));
}

/// Returns the range of the directory, and stores the number of entries in `count`.
ZipFile::Range ZipFile::find_directory(uint64_t& count) const {
  const auto file_size = static_cast<uint64_t>(file_.size());
  std::string tail(std::min<uint64_t>(file_size, kLocatorBytes + kEndBytes + kMaxComment), '\0');
  file_.read_at(static_cast<int64_t>(file_size - tail.size()), tail.data(), tail.size());
  size_t end = tail.rfind("PK\x05\x06"sv);
  while (end != std::string::npos &&
         (tail.size() - end < kEndBytes || tail.size() - end - kEndBytes != get<uint16_t>(tail, end + 20)))
    end = end == 0 ? std::string::npos : tail.rfind("PK\x05\x06"sv, end - 1);
  file_.check(end != std::string::npos, "truncated: the zip archive has no directory at its end");
  count = get<uint16_t>(tail, end + 10);
  uint64_t size = get<uint32_t>(tail, end + 12), position = get<uint32_t>(tail, end + 16);
  if (end >= kLocatorBytes && tail.compare(end - kLocatorBytes, 4, "PK\x06\x07"sv) == 0) {
    const uint64_t end64 = get<uint64_t>(tail, end - kLocatorBytes + 8);
    file_.check(end64 <= file_size && kEnd64Bytes <= file_size - end64, "the zip64 end record is outside the file");
    char record[kEnd64Bytes];
    file_.read_at(static_cast<int64_t>(end64), record, kEnd64Bytes);
    const std::string_view view(record, kEnd64Bytes);
    file_.check(view.starts_with("PK\x06\x06"sv), "the zip64 end record is malformed");
    count = get<uint64_t>(view, 32);
    size = get<uint64_t>(view, 40);
    position = get<uint64_t>(view, 48);
  }
  file_.check(position <= file_size && size <= file_size - position,
              "the directory of the zip archive is outside the file");
  return {static_cast<int64_t>(position), static_cast<int64_t>(size)};
}

/// Adds the entry at the start of `record`. Returns the number of bytes that describe the entry.
size_t ZipFile::add_entry(std::string_view record) {
  file_.check(record.size() >= kEntryBytes && record.starts_with("PK\x01\x02"sv),
              "the directory of the zip archive is malformed or truncated");
  const size_t name_size = get<uint16_t>(record, 28), extra_size = get<uint16_t>(record, 30);
  const size_t bytes = kEntryBytes + name_size + extra_size + get<uint16_t>(record, 32);
  file_.check(bytes <= record.size(), "the directory of the zip archive is truncated");
  const std::string name(record.substr(kEntryBytes, name_size));
  uint64_t packed = get<uint32_t>(record, 20), size = get<uint32_t>(record, 24), header = get<uint32_t>(record, 42);
  file_.check(read_zip64(record.substr(kEntryBytes + name_size, extra_size), {&size, &packed, &header}), "entry ",
              in_quotes(name), ": malformed zip64 field");
  // The limit on the sum rejects archives whose entries share bytes. A small archive of this kind could fill the
  // memory.
  const auto available = static_cast<uint64_t>(file_.size() - total_);
  file_.check(packed <= available && header < static_cast<uint64_t>(file_.size()), "entry ", in_quotes(name),
              " is outside the file or overlaps another entry; the file may be truncated");
  total_ += static_cast<int64_t>(packed);
  const bool is_stored = get<uint16_t>(record, 10) == 0 && (get<uint16_t>(record, 8) & 1) == 0 && packed == size;
  const Entry entry{static_cast<int64_t>(header), static_cast<int64_t>(packed), is_stored};
  file_.check(entries_.emplace(name, entry).second, "entry ", in_quotes(name), " occurs twice");
  return bytes;
}

ZipFile::Range ZipFile::find(const std::string& name) const {
  const auto found = entries_.find(name);
  file_.check(found != entries_.end(), "entry ", in_quotes(name), " is missing");
  const Entry& entry = found->second;
  file_.check(entry.stored, "entry ", in_quotes(name), " is compressed or encrypted; torch.save does neither");
  char header[kLocalHeaderBytes];
  file_.read_at(entry.header, header, kLocalHeaderBytes);
  const std::string_view view(header, kLocalHeaderBytes);
  file_.check(view.starts_with("PK\x03\x04"sv), "entry ", in_quotes(name), " has no local header");
  const auto names = static_cast<int64_t>(get<uint16_t>(view, 26) + get<uint16_t>(view, 28));
  const int64_t position = entry.header + static_cast<int64_t>(kLocalHeaderBytes) + names;
  file_.check(position <= file_.size() && entry.size <= file_.size() - position, "entry ", in_quotes(name),
              " reaches outside the file");
  return {position, entry.size};
}

}  // namespace voxgrad
