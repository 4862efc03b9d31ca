// Tests of SummaryWriter with an independent reader of event files: records, checksums, message fields and images.
#include "nn/summary_writer.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <system_error>

#include "ops/create.h"
#include "tests/core/file_support.h"

namespace voxgrad {
namespace {

template <class T>
T number_at(const std::string& bytes, size_t position) {
  T value{};
  std::memcpy(&value, bytes.substr(position, sizeof(T)).data(), std::min(sizeof(T), bytes.size() - position));
  return value;
}

/// Returns the CRC-32C. Processes one bit at a time with the polynomial 0x1EDC6F41 (most significant bit first).
uint32_t crc32c(const std::string& bytes) {
  const auto reversed = [](uint32_t x, int bits) {
    uint32_t y = 0;
    for (int i = 0; i < bits; ++i) y |= (x >> i & 1u) << (bits - 1 - i);
    return y;
  };
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= reversed(static_cast<unsigned char>(c), 8) << 24;
    for (int bit = 0; bit < 8; ++bit) crc = crc << 1 ^ (crc >> 31 ? 0x1edc6f41u : 0u);
  }
  return reversed(~crc, 32);
}

uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

TEST(EventFile, TheReaderComputesStandardCrc32c) { EXPECT_EQ(crc32c("123456789"), 0xe3069283u); }

/// Returns the payloads of all complete records and checks their checksums.
std::vector<std::string> records(const std::string& file) {
  std::vector<std::string> all;
  for (size_t at = 0; at + 16 <= file.size();) {
    const auto length = number_at<uint64_t>(file, at);
    if (at + 16 + length > file.size()) break;
    EXPECT_EQ(number_at<uint32_t>(file, at + 8), masked(crc32c(file.substr(at, 8))));
    all.push_back(file.substr(at + 12, length));
    EXPECT_EQ(number_at<uint32_t>(file, at + 12 + length), masked(crc32c(all.back())));
    at += 16 + length;
  }
  return all;
}

/// The fields of a protobuf message by field number: integers by value, other fields as bytes.
struct Fields {
  std::multimap<int, std::string> blocks;
  std::multimap<int, uint64_t> integers;

  explicit Fields(const std::string& bytes) {
    size_t at = 0;
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.at(at++));
        value |= static_cast<uint64_t>(byte & 127) << shift;
        if (byte < 128) return value;
      }
    };
    while (at < bytes.size()) {
      const uint64_t key = varint();
      const auto field = static_cast<int>(key >> 3);
      const size_t fixed = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : 0;
      if (key % 8 == 0) {
        integers.emplace(field, varint());
      } else {
        const size_t length = fixed > 0 ? fixed : varint();
        EXPECT_LE(at + length, bytes.size());
        blocks.emplace(field, bytes.substr(at, length));
        at += length;
      }
    }
  }
  std::string text(int field) const { return blocks.count(field) == 1 ? blocks.find(field)->second : "?"; }
  Fields message(int field) const { return Fields(text(field)); }
  uint64_t integer(int field) const { return integers.count(field) == 1 ? integers.find(field)->second : ~0ull; }
  double f64(int field) const { return number_at<double>(text(field), 0); }
  float f32(int field) const { return number_at<float>(text(field), 0); }
};

class SummaryWriterTest : public FileTest {
 protected:
  /// Returns all events except the first, which must hold the format version.
  std::vector<Fields> events(const SummaryWriter& writer) {
    const std::vector<std::string> all = records(get(writer.path()));
    EXPECT_EQ(Fields(all.at(0)).text(3), "brain.Event:2");
    std::vector<Fields> rest;
    for (size_t i = 1; i < all.size(); ++i) rest.emplace_back(all[i]);
    return rest;
  }
  static Fields value(const Fields& event) { return event.message(5).message(1); }
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

TEST_F(SummaryWriterTest, WritesScalarsAndSteps) {
  SummaryWriter writer(path("run/deep"), 7);
  EXPECT_NE(writer.path().filename().string().find("tfevents"), std::string::npos);
  writer.add_scalar("loss/train", 0.1, 300);
  writer.add_scalar("x", kNan, -1);
  writer.add_scalar("x", -kInfinity);
  EXPECT_ERROR(writer.add_scalar("", 1), "the tag is empty");
  const auto all = events(writer);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].integer(2), 7u);
  EXPECT_EQ(all[0].message(7).integer(1), 1u);  // SessionLog.START
  EXPECT_EQ(all[1].integer(2), 300u);
  EXPECT_EQ(value(all[1]).text(1), "loss/train");
  EXPECT_EQ(value(all[1]).f32(2), 0.1f);
  EXPECT_EQ(all[2].integer(2), ~0ull);  // -1
  EXPECT_GT(all[2].f64(1), 1.6e9);      // the current time
  EXPECT_TRUE(std::isnan(value(all[2]).f32(2)));
  EXPECT_EQ(value(all[3]).f32(2), -INFINITY);
}

/// Returns the pixels of a PNG image whose rows are not filtered. Checks its chunks and their checksums.
std::string png_pixels(const std::string& png, uint32_t width, uint32_t height, uint32_t channels, char color_type) {
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  const auto big = [&](size_t at) { return __builtin_bswap32(number_at<uint32_t>(png, at)); };
  std::string types, data;
  for (size_t at = 8; at + 12 <= png.size(); at += 12 + big(at)) {
    const std::string body = png.substr(at + 4, 4 + big(at));
    EXPECT_EQ(big(at + 8 + big(at)), crc32(0, reinterpret_cast<const Bytef*>(body.data()), uInt(body.size())));
    types += body.substr(0, 4);
    if (types == "IHDR") {
      EXPECT_EQ(big(at + 8), width);
      EXPECT_EQ(big(at + 12), height);
      EXPECT_EQ(body.substr(12), std::string({8, color_type, 0, 0, 0}));
    } else if (body.starts_with("IDAT")) {
      data = body.substr(4);
    }
  }
  EXPECT_EQ(types, "IHDRIDATIEND");
  std::string rows((width * channels + 1) * height, '?');
  uLongf length = rows.size();
  EXPECT_EQ(uncompress(reinterpret_cast<Bytef*>(rows.data()), &length,  //
                       reinterpret_cast<const Bytef*>(data.data()), data.size()),
            Z_OK);
  EXPECT_EQ(length, rows.size());
  std::string pixels;
  for (size_t row = 0; row < height; ++row) {
    EXPECT_EQ(rows[row * (width * channels + 1)], 0);
    pixels += rows.substr(row * (width * channels + 1) + 1, width * channels);
  }
  return pixels;
}

TEST_F(SummaryWriterTest, WritesImagesAsPng) {
  SummaryWriter writer(path("run"));
  writer.add_image("gray", tensor({{0, 0.5, 1}, {-1, 2, kNan}}), 3);
  const Tensor color = from_span<uint8_t>(std::vector<uint8_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {3, 2, 2});
  for (const Device device : devices()) writer.add_image("color", color.to(device).transpose(1, 2));
  EXPECT_ERROR(writer.add_image("x", zeros({2, 4, 4})), "with 1, 3 or 4 channels, got [2, 4, 4] f32 on cpu");
  EXPECT_ERROR(writer.add_image("x", zeros({3, 0, 4})), "add_image 'x': expected (H, W)");
  EXPECT_ERROR(writer.add_image("x", zeros({4, 4}, {.dtype = i64})), "expected floats, u8 or bool");
  EXPECT_ERROR(writer.add_image("x", {}), "add_image 'x': expected (H, W)");
  const auto all = events(writer);
  ASSERT_EQ(all.size(), 1 + devices().size());
  const Fields gray = value(all[0]).message(4);
  EXPECT_EQ(std::vector<uint64_t>({gray.integer(1), gray.integer(2), gray.integer(3)}),
            std::vector<uint64_t>({2, 3, 1}));
  EXPECT_EQ(png_pixels(gray.text(4), 3, 2, 1, 0), std::string({'\0', '\x7f', '\xff', '\0', '\xff', '\0'}));
  for (size_t i = 1; i < all.size(); ++i) {
    const Fields picture = value(all[i]).message(4);
    EXPECT_EQ(picture.integer(3), 3u);
    EXPECT_EQ(png_pixels(picture.text(4), 2, 2, 3, 2), std::string({1, 5, 9, 3, 7, 11, 2, 6, 10, 4, 8, 12}));
  }
}

TEST_F(SummaryWriterTest, ATruncatedFileIsReadableUpToTheLastRecord) {
  SummaryWriter writer(path("run"));
  for (int i = 0; i < 3; ++i) writer.add_scalar("x", i, i);
  const std::string whole = get(writer.path());  // events are written before the writer is destroyed
  const std::vector<std::string> all = records(whole);
  ASSERT_EQ(all.size(), 4u);
  size_t end = 0, complete = 0;
  for (size_t length = 0; length <= whole.size(); ++length) {
    if (complete < all.size() && length == end + 16 + all[complete].size()) end += 16 + all[complete++].size();
    EXPECT_EQ(records(whole.substr(0, length)).size(), complete) << length;
  }
}

TEST_F(SummaryWriterTest, AKilledRunLeavesCompleteRecords) {
  const pid_t run = fork();
  ASSERT_GE(run, 0);
  if (run == 0) {
    SummaryWriter writer(path("run"));
    for (int i = 0; i < 100'000; ++i) writer.add_scalar(std::string(1000, 'x'), i, i);  // at most 100 MB
    _exit(0);
  }
  std::filesystem::path file;
  std::error_code none;
  while (file.empty() || std::filesystem::file_size(file) < 20000) {
    usleep(100);
    for (const auto& entry : std::filesystem::directory_iterator(path("run"), none)) file = entry.path();
  }
  kill(run, SIGKILL);
  waitpid(run, nullptr, 0);
  EXPECT_GE(records(get(file)).size(), 20u);
}

TEST_F(SummaryWriterTest, TwoWritersUseSeparateFiles) {
  SummaryWriter a(path("run")), b(path("run"));
  EXPECT_NE(a.path(), b.path());
  a.flush();
}

TEST_F(SummaryWriterTest, RejectsFoldersThatCannotBeCreated) {
  put("file", "x");
  EXPECT_ERROR(SummaryWriter(path("file")),
               "SummaryWriter: cannot create the folder '" + path("file").string() + "': ");
  EXPECT_ERROR(SummaryWriter(path("file/run")), "cannot create the folder '");
  if (geteuid() == 0) return;  // root may write everywhere
  std::filesystem::create_directory(path("closed"));
  std::filesystem::permissions(path("closed"), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_ERROR(SummaryWriter(path("closed")), "Permission denied");
}

TEST_F(SummaryWriterTest, AFailedWriteRemovesThePartialRecord) {
  SummaryWriter writer(path("run"));
  writer.add_scalar("x", 1);
  const std::string before = get(writer.path());
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{before.size() + 20, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_ERROR(writer.add_scalar(std::string(100, 'x'), 1), "cannot write '" + writer.path().string() + "': ");
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, previous);
  EXPECT_EQ(get(writer.path()), before);
  writer.add_scalar("x", 2);
  EXPECT_EQ(events(writer).size(), 2u);
}

}  // namespace
}  // namespace voxgrad
