// Implements InputFile and the checks that all readers share.
#include "core/io/detail/input_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace voxgrad {
namespace {

using namespace std::string_view_literals;

/// The first bytes of files of well-known formats.
constexpr std::pair<std::string_view, const char*> kFormats[] = {
    {"PK\x03\x04"sv, "a zip archive, as torch.save and numpy.savez write"},
    {"\x80\x02"sv, "a Python pickle, as torch.save wrote before PyTorch 1.6"},
    {"\x80\x04"sv, "a Python pickle"},
    {"\x93NUMPY"sv, "NumPy's .npy"},
    {"\x89HDF\r\n\x1a\n"sv, "HDF5"},
    {"\x1f\x8b"sv, "gzip"},
    {"GGUF"sv, "GGUF"},
    {"\x5c\x01\0\0"sv, "NIfTI-1"},
};

}  // namespace

std::string in_bytes(int64_t count) { return concat(count, count == 1 ? " byte" : " bytes"); }

InputFile::InputFile(const std::filesystem::path& path, const char* op, int64_t max_bytes)
    : name_(path.string()), op_(op), max_bytes_(max_bytes) {
  const auto fail_with = [&](int error) {
    voxgrad::fail(op, "cannot read '", name_, "': ", std::generic_category().message(error));
  };
  // Without O_NONBLOCK, open() would wait for the writer of a pipe.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail_with(errno);
  struct stat status;
  const int error = fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (error != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    if (error != 0) fail_with(error);
    const char* kind = S_ISDIR(status.st_mode) ? "a directory" : "not a regular file";
    voxgrad::fail(op, "cannot read '", name_, "': it is ", kind);
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { close(descriptor_); }

std::string InputFile::other_format() const {
  std::string start(static_cast<size_t>(std::min<int64_t>(size_, 8)), '\0');
  read_at(0, start.data(), start.size());
  for (const auto& [magic, format] : kFormats)
    if (start.starts_with(magic)) return concat("; it is ", format);
  return {};
}

void InputFile::read_at(int64_t position, void* to, size_t bytes) const {
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, next, bytes, position);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(std::generic_category().message(errno));
    check(got > 0, "truncated: the file lacks ", in_bytes(static_cast<int64_t>(bytes)));
    next += got;
    bytes -= static_cast<size_t>(got);
    position += got;
  }
}

Tensor InputFile::tensor_at(int64_t position, const Shape& shape, DType dtype) const {
  const auto bytes = static_cast<size_t>(numel(shape) * item_size(dtype));
  if (bytes > 0 && position % item_size(dtype) == 0) {
    const auto length = static_cast<size_t>(size_);
    if (map_ == nullptr) {
      void* map = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
      if (map != MAP_FAILED) map_ = {static_cast<char*>(map), [length](char* data) { munmap(data, length); }};
    }
    if (map_ != nullptr) return from_blob(map_.get() + position, shape, {.dtype = dtype}, [map = map_](void*) {});
  }
  Tensor tensor = empty(shape, {.dtype = dtype});
  read_at(position, tensor.mutable_raw_data(), bytes);
  return tensor;
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  std::string shown(text.substr(0, kMaxShown));
  std::replace_if(
      shown.begin(), shown.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return concat("'", shown, text.size() > kMaxShown ? "...'" : "'");
}

int64_t claimed_bytes(const InputFile& file, const std::string& what, const Shape& shape, std::string_view dtype,
                      int64_t bits) {
  bool overflow = false;
  bool empty = false;
  for (int64_t size : shape) {
    file.check(size >= 0, what, "negative size in shape ", shape);
    empty |= size == 0;
    overflow |= __builtin_mul_overflow(bits, std::max<int64_t>(size, 1), &bits);
  }
  file.check(!overflow, what, "the number of bits of ", shape, ' ', dtype, " does not fit in 64 bits");
  file.check(empty || bits % 8 == 0, what, shape, ' ', dtype, " takes ", bits, " bits, not a whole number of bytes");
  return empty ? 0 : bits / 8;
}

void check_bools(const InputFile& file, const std::string& what, const Tensor& tensor) {
  const auto* data = static_cast<const unsigned char*>(tensor.raw_data());
  const auto* end = data + tensor.numel();
  const auto* bad = std::find_if(data, end, [](unsigned char byte) { return byte > 1; });
  file.check(bad == end, what, "a bool must be 0 or 1, found ", bad == end ? 0 : int{*bad});
}

void swap_bytes(void* elements, int64_t size, int64_t count) {
  auto* data = static_cast<char*>(elements);
  for (int64_t i = 0; i < count; ++i) std::reverse(data + i * size, data + (i + 1) * size);
}

}  // namespace voxgrad
