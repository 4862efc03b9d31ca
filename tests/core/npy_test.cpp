// Tests of .npy files: header spellings, dtypes, byte orders, partial reads, and malformed files.
#include "core/io/npy.h"

#include <sstream>

#include "tests/core/file_support.h"

namespace voxgrad {
namespace {

using NpyTest = FileTest;

/// Returns the bytes of a version 1.0 .npy file with this header and data.
std::string file_of(const std::string& header, const std::string& data) {
  return "\x93NUMPY" + std::string("\1\0", 2) + bytes_of(static_cast<uint16_t>(header.size())) + header + data;
}

std::string header_of(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
}

/// Returns the bytes of `count` elements with the values 0, 1, 2, ... For bool, the values are false, true, false, ...
template <class T>
std::string elements(int64_t count, bool big_endian = false) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, bool>)
      bytes += bytes_of(i % 2 == 1);
    else if constexpr (std::is_same_v<T, Float16>)
      bytes += bytes_of(Float16(static_cast<float>(i)), big_endian);
    else
      bytes += bytes_of(static_cast<T>(i), big_endian);
  }
  return bytes;
}

template <class T>
class NpyDtypeTest : public NpyTest {};
using Elements = ::testing::Types<float, double, Float16, int64_t, int32_t, uint8_t, bool>;
TYPED_TEST_SUITE(NpyDtypeTest, Elements);

TYPED_TEST(NpyDtypeTest, ReadsBothByteOrdersAndRoundTrips) {
  const DType dtype = dtype_of<TypeParam>;
  const std::string kind = dtype == b8 ? "b" : dtype == u8 ? "u" : is_floating(dtype) ? "f" : "i";
  const std::string code = concat(kind, item_size(dtype));
  std::vector<double> expected;
  for (int i = 0; i < 6; ++i) expected.push_back(dtype == b8 ? i % 2 : i);
  for (const std::string order : {"<", ">", "=", "|"}) {
    if (order == "|" && item_size(dtype) > 1) continue;
    const std::string bytes = file_of(header_of(order + code, "False", "(2, 3)"), elements<TypeParam>(6, order == ">"));
    const Tensor tensor = load_npy(this->put("f", bytes));
    EXPECT_EQ(concat(describe(tensor)), concat("[2, 3] ", dtype, " on cpu"));
    EXPECT_EQ(tensor.to_vector(), expected) << order;
    save_npy(this->path("g"), tensor);
    EXPECT_EQ(load_npy(this->path("g")).to_vector(), expected);
  }
}

TEST_F(NpyTest, ReadsPartsOfAFile) {
  for (const char* order : {"False", "True"})
    for (const bool big : {false, true}) {
      const std::string header = header_of(big ? ">i4" : "<i4", order, "(3, 4, 5)");
      const auto file = put("f", file_of(header, elements<int32_t>(60, big)));
      const Tensor whole = load_npy(file);
      const NpyFile parts(file, {.max_bytes = 60});
      EXPECT_EQ(parts.shape(), (Shape{3, 4, 5}));
      EXPECT_EQ(parts.dtype(), i32);
      const Tensor part = parts.read({1, 1, 2}, {2, 2, 3});
      EXPECT_EQ(concat(describe(part)), "[2, 2, 3] i32 on cpu");
      EXPECT_TRUE(part.is_contiguous());
      EXPECT_EQ(part.to_vector(), whole.narrow(0, 1, 2).narrow(1, 1, 2).narrow(2, 2, 3).to_vector());
      EXPECT_EQ(parts.read({2, 1, 0}, {1, 3, 5}).to_vector(), whole.narrow(0, 2, 1).narrow(1, 1, 3).to_vector());
      EXPECT_ERROR(parts.read({0, 0, 0}, {1, 4, 5}), "more than max_bytes, which is 60");
      EXPECT_ERROR(parts.read({0, 0, 3}, {1, 1, 3}),
                   "a part of size [1, 1, 3] at [0, 0, 3] does not lie within [3, 4, 5]");
    }
  const auto bools = put("f", file_of(header_of("|b1", "False", "(3,)"), std::string("\0\1\2", 3)));
  EXPECT_EQ(NpyFile(bools).read({0}, {2}).to_vector(), (std::vector<double>{0, 1}));
  EXPECT_ERROR(NpyFile(bools).read({1}, {2}), "NpyFile: '" + bools.string() + "': a bool must be 0 or 1, found 2");
  EXPECT_ERROR(NpyFile(put("f", "x")), "NpyFile: '" + path("f").string() + "': truncated");
}

TEST_F(NpyTest, ReadsFortranOrder) {
  const auto file = put("f", file_of(header_of("<i4", "True", "(2, 3)"), elements<int32_t>(6)));
  const Tensor tensor = load_npy(file);
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_EQ(tensor.to_vector<int64_t>(), (std::vector<int64_t>{0, 2, 4, 1, 3, 5}));
  const auto swapped = put("f", file_of(header_of(">i4", "True", "(2, 3, 1)"), elements<int32_t>(6, true)));
  EXPECT_EQ(load_npy(swapped).to_vector<int64_t>(), (std::vector<int64_t>{0, 2, 4, 1, 3, 5}));
}

TEST_F(NpyTest, ReadsVersions1To3) {
  const std::string header = header_of("|u1", "False", "(2,)"), data = "\1\2";
  const std::string length = bytes_of(static_cast<uint32_t>(header.size()));
  for (const char major : {'\2', '\3'}) {
    const Tensor tensor = load_npy(put("f", "\x93NUMPY" + std::string{major, '\0'} + length + header + data));
    EXPECT_EQ(tensor.to_vector<int64_t>(), (std::vector<int64_t>{1, 2}));
  }
  const auto with_version = [&](char major, char minor) {
    return put("f", "\x93NUMPY" + std::string{major, minor} + length + header + data);
  };
  EXPECT_ERROR(load_npy(with_version(0, 0)), "unknown version 0.0");
  EXPECT_ERROR(load_npy(with_version(4, 0)), "unknown version 4.0");
  EXPECT_ERROR(load_npy(with_version(1, 1)), "unknown version 1.1");
  const std::string two("\x93NUMPY\2\0", 8);
  EXPECT_ERROR(load_npy(put("f", two + bytes_of(UINT32_MAX) + header)), "exceeds 65535 bytes");
  EXPECT_ERROR(load_npy(put("f", two + bytes_of(uint32_t{60000}) + header)), "truncated: header length 60000");
}

TEST_F(NpyTest, ReadsShapes) {
  const auto load = [&](const std::string& shape, int64_t count) {
    return load_npy(put("f", file_of(header_of("|u1", "False", shape), elements<uint8_t>(count)))).shape();
  };
  EXPECT_EQ(load("()", 1), Shape({}));
  EXPECT_EQ(load("(0,)", 0), Shape({0}));
  EXPECT_EQ(load("( 2,3 , 4,)", 24), Shape({2, 3, 4}));
  EXPECT_EQ(load("(1, 1, 1, 1, 1, 1, 1, 2)", 2), Shape({1, 1, 1, 1, 1, 1, 1, 2}));
}

TEST_F(NpyTest, IgnoresWhiteSpaceBetweenTokens) {
  const char* forms[] = {
      "{'descr':'|u1','fortran_order':False,'shape':(2,)}",
      " { 'descr' : '|u1' , 'fortran_order' : True , 'shape' : ( 2 , ) } \n",
      "{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}          \n",
  };
  for (const char* form : forms) {
    SCOPED_TRACE(form);
    EXPECT_EQ(load_npy(put("f", file_of(form, "\1\2"))).shape(), Shape({2}));
  }
}

TEST_F(NpyTest, WritesTheSameBytesAsNumPy) {
  Tensor tensor = empty({2, 3});
  for (int64_t i = 0; i < 6; ++i) tensor.set({i / 3, i % 3}, static_cast<double>(i));
  const auto expected = [](std::string header, const std::string& data) {
    header.resize(117, ' ');
    return file_of(header + "\n", data);
  };
  save_npy(path("f"), tensor);
  EXPECT_EQ(get(path("f")), expected(header_of("<f4", "False", "(2, 3)"), elements<float>(6)));
  save_npy(path("f"), as_strided(tensor, {2}, {3}, 1));
  EXPECT_EQ(get(path("f")), expected(header_of("<f4", "False", "(2,)"), bytes_of(1.0f) + bytes_of(4.0f)));
  save_npy(path("f"), as_strided(tensor, {}, {}, 5));
  EXPECT_EQ(get(path("f")), expected(header_of("<f4", "False", "()"), bytes_of(5.0f)));
  save_npy(path("f"), empty({3, 0}, {.dtype = b8}));
  EXPECT_EQ(get(path("f")), expected(header_of("|b1", "False", "(3, 0)"), ""));
}

TEST_F(NpyTest, LoadsToEveryDevice) {
  for (const Device device : devices()) {
    const auto file = put("f", file_of(header_of(">f4", "True", "(2, 3)"), elements<float>(6, true)));
    const Tensor tensor = load_npy(file, device);
    EXPECT_EQ(tensor.device(), device);
    save_npy(path("g"), tensor);
    EXPECT_EQ(load_npy(path("g")).to_vector(), (std::vector<double>{0, 2, 4, 1, 3, 5}));
  }
}

struct Malformed {
  std::string header;
  const char* message;
};

/// Malformed headers and a part of the expected error message. Each file has 8 bytes of data.
const Malformed kMalformed[] = {
    {"", "malformed header: expected { at byte 0"},
    {"{}", "malformed header: expected 'descr' at byte 1"},
    {"{'descr': '|u1', 'shape': (8,)}", "malformed header: expected 'fortran_order'"},
    {"{'descr': '|u1' 'fortran_order': False, 'shape': (8,)}", "malformed header: expected ,"},
    {"{'descr': '|u1", "malformed header: expected '"},
    {"{'descr': '|u1', 'descr': '|u1', 'fortran_order': False, 'shape': (8,)}", "malformed header"},
    {"{'descr': '|u1', 'fortran_order': False, 'shape': (8,), 'x': 1}", "malformed header: expected }"},
    {header_of("|u1", "False", "(8,)") + "x", "unexpected text after the dict of the header"},
    {header_of("|u1", "False", "(8,)") + std::string(1, '\0'), "unexpected text after the dict of the header"},
    {header_of("|u1", "0", "(8,)"), "malformed header: expected False"},
    {header_of("|u1", "Falsey", "(8,)"), "malformed header"},
    {header_of("|u1", "False", "8"), "malformed header: expected ("},
    {header_of("|u1", "False", "(8)"), "malformed header: expected ,"},
    {header_of("|u1", "False", "(,)"), "a size in the shape is not an integer"},
    {header_of("|u1", "False", "(8,,)"), "a size in the shape is not an integer"},
    {header_of("|u1", "False", "(-8,)"), "a size in the shape is not an integer from 0 to 2^63 - 1: '-8"},
    {header_of("|u1", "False", "(8.0,)"), "malformed header: expected ,"},
    {header_of("|u1", "False", "(2, True)"), "a size in the shape is not an integer"},
    {header_of("|u1", "False", "(2 4)"), "malformed header: expected ,"},
    {header_of("|u1", "False", "(1, 2 4)"), "malformed header: expected ,"},
    {header_of("|u1", "False", "(99999999999999999999,)"), "a size in the shape is not an integer"},
    {header_of("|u1", "False", "(4294967296, 4294967296)"), "does not fit in 64 bits"},
    {header_of("|u1", "False", "(0, 4294967296, 4294967296)"), "does not fit in 64 bits"},
    {header_of("<f8", "False", "(2305843009213693952,)"), "does not fit in 64 bits"},
    {header_of("|u1", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 8)"), "more than 8 axes"},
    {header_of("|O", "False", "(1,)"), "pickled"},
    {header_of("O", "False", "(1,)"), "pickled"},
    {"{'descr': [('x', '<f4'), ('y', '<f4')], 'fortran_order': False, 'shape': (1,)}", "structured dtypes"},
    {"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}", "structured dtypes"},
    {header_of("<c8", "False", "(1,)"), "dtype '<c8' is not supported"},
    {header_of("<u8", "False", "(1,)"), "dtype '<u8' is not supported"},
    {header_of("|V8", "False", "(1,)"), "dtype '|V8' is not supported"},
    {header_of("<U2", "False", "(1,)"), "dtype '<U2' is not supported"},
    {header_of("<f4x", "False", "(2,)"), "dtype '<f4x' is not supported"},
    {header_of("", "False", "(1,)"), "dtype '' is not supported"},
    {header_of("|f8", "False", "(1,)"), "has no valid byte order"},
    {header_of("?f8", "False", "(1,)"), "has no valid byte order"},
    {header_of("|u1", "False", "(9,)"), "truncated: [9] u8 takes 9 bytes, but the file has 8"},
    {header_of("|u1", "False", "(1099511627776,)"), "truncated"},
    {header_of("|u1", "False", "(7,)"), "trailing bytes"},
    {header_of("|u1", "False", "(0,)"), "trailing bytes"},
    {header_of("|b1", "False", "(8,)"), "a bool must be 0 or 1, found 7"},
};

TEST_F(NpyTest, RejectsMalformedHeaders) {
  for (const auto& [header, message] : kMalformed) {
    SCOPED_TRACE(header);
    const auto file = put("f", file_of(header, std::string(8, '\7')));
    EXPECT_ERROR(load_npy(file), message);
    EXPECT_ERROR(load_npy(file), "load_npy: '" + file.string() + "': ");
  }
}

TEST_F(NpyTest, RejectsOtherFiles) {
  EXPECT_ERROR(load_npy(put("f", "")), "truncated: a .npy header has at least 10 bytes, but the file has 0");
  EXPECT_ERROR(load_npy(put("f", "PK\3\4 a zip archive")),
               "not a .npy file: the magic string is missing; it is a zip archive");
  EXPECT_ERROR(load_npy(path("none")), "load_npy: cannot read '" + path("none").string() + "': No such file");
  EXPECT_ERROR(load_npy(path("")), "it is a directory");
}

TEST_F(NpyTest, RespectsMaxBytes) {
  const auto file = put("f", file_of(header_of("<i4", "False", "(2, 3)"), elements<int32_t>(6)));
  const int64_t allocations = memory::stats().allocations;
  EXPECT_ERROR(load_npy(file, Device::cpu(), {.max_bytes = 23}),
               "load_npy: '" + file.string() + "': [2, 3] i32 takes 24 bytes, more than max_bytes, which is 23");
  EXPECT_EQ(memory::stats().allocations, allocations);
  EXPECT_EQ(load_npy(file, Device::cpu(), {.max_bytes = 24}).numel(), 6);
}

TEST_F(NpyTest, RejectsTensorsThatCannotBeSaved) {
  EXPECT_ERROR(save_npy(path("f"), Tensor()), "the tensor is undefined");
  EXPECT_ERROR(save_npy(path("f"), empty({1}, {.dtype = bf16})), "NumPy has no bf16");
  EXPECT_ERROR(save_npy(path("none/f"), empty({1})), "No such file or directory");
  EXPECT_EQ(file_count(), 0);
}

TEST_F(NpyTest, ThrowsOnlyErrorForDamagedFiles) {
  const std::string bytes = file_of(header_of("<i4", "True", "(2, 3)"), elements<int32_t>(6));
  expect_loads_or_rejects_damaged("f", bytes, [](const auto& file) { return load_npy(file); });
}

TEST_F(NpyTest, MapsFilesPrivately) {
  std::string header = header_of("<i4", "False", "(2, 2)");
  while ((10 + header.size()) % 4 != 0) header += ' ';
  Tensor tensor = load_npy(put("f", file_of(header, elements<int32_t>(4))));
  EXPECT_TRUE(is_mapped(path("f")));
  tensor.set({1, 1}, 7);
  EXPECT_EQ(load_npy(path("f")).to_vector(), (std::vector<double>{0, 1, 2, 3}));
  std::filesystem::remove(path("f"));
  EXPECT_EQ(tensor.to_vector(), (std::vector<double>{0, 1, 2, 7}));
  tensor = {};
  EXPECT_FALSE(is_mapped(path("f")));

  const Tensor unaligned = load_npy(put("g", file_of(header + ' ', elements<int32_t>(4))));
  EXPECT_FALSE(is_mapped(path("g")));
  EXPECT_EQ(unaligned.to_vector(), (std::vector<double>{0, 1, 2, 3}));
}

TEST_F(NpyTest, OpensLargeFilesWithoutReadingThem) {
  constexpr int64_t kCount = int64_t{10} << 30;
  const std::string header = header_of("|u1", "False", concat("(", kCount, ",)"));
  const std::filesystem::path file = put("f", file_of(header, ""));
  const auto begin = std::filesystem::file_size(file);
  std::filesystem::resize_file(file, begin + kCount);  // a sparse file
  const auto resident = [] {
    std::istringstream pages(get("/proc/self/statm"));
    int64_t all = 0, used = 0;
    pages >> all >> used;
    return used * sysconf(_SC_PAGESIZE);
  };
  const int64_t before = resident();
  const Tensor tensor = load_npy(file);
  EXPECT_EQ(tensor.at({kCount - 1}), 0);
  EXPECT_LT(resident() - before, int64_t{16} << 20);
}

}  // namespace
}  // namespace voxgrad
