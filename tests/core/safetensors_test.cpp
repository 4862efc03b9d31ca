// Tests of safetensors files: reading, writing, checksums, limits, and malformed files.
#include "core/io/safetensors.h"

#include "ops/create.h"
#include "tests/core/file_support.h"

namespace voxgrad {
namespace {

using SafetensorsTest = FileTest;

/// Returns the bytes of a safetensors file with this header and data.
std::string file_of(const std::string& header, const std::string& data) {
  return bytes_of(static_cast<uint64_t>(header.size())) + header + data;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

const std::string kPair = "{\"__metadata__\":{\"k\":\"v\"},\"b\":" + entry("F32", "[2]", "[3,11]") +
                          ",\"a\":" + entry("U8", "[3,1]", "[0,3]") + "}";
const std::string kPairData = std::string("\1\2\3") + bytes_of(1.5f) + bytes_of(-2.0f);

TEST_F(SafetensorsTest, ReadsTensorsAndMetadata) {
  Metadata metadata{{"stale", "entry"}};
  const TensorMap tensors =
      load_safetensors(put("f", file_of(kPair + " \t\r\n ", kPairData)), Device::cpu(), &metadata);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(concat(describe(tensors.at("a"))), "[3, 1] u8 on cpu");
  EXPECT_EQ(tensors.at("a").to_vector<int64_t>(), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(concat(describe(tensors.at("b"))), "[2] f32 on cpu");
  EXPECT_EQ(tensors.at("b").to_vector(), (std::vector<double>{1.5, -2}));
  EXPECT_EQ(metadata, (Metadata{{"k", "v"}}));
}

TEST_F(SafetensorsTest, WritesTheExpectedBytes) {
  Tensor narrow = empty({2}, {.dtype = u8}), wide = empty({}, {.dtype = f64});
  narrow.set({0}, 7);
  narrow.set({1}, 8);
  wide.set({}, 0.5);
  save_safetensors(path("f"), {{"a", narrow}, {"w", wide}}, {{"k", "v"}});
  std::string header = "{\"__metadata__\":{\"k\":\"v\"},\"w\":" + entry("F64", "[]", "[0,8]") +
                       ",\"a\":" + entry("U8", "[2]", "[8,10]") + "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(get(path("f")), file_of(header, bytes_of(0.5) + "\7\10"));
}

TEST_F(SafetensorsTest, SavedTensorsOfEveryDtypeLoadUnchanged) {
  TensorMap tensors;
  for (const DType dtype : {f32, f64, bf16, f16, i64, i32, u8, b8}) {
    Tensor tensor = empty({2, 3}, {.dtype = dtype});
    for (int64_t i = 0; i < 6; ++i) tensor.set({i / 3, i % 3}, dtype == b8 ? i % 2 : static_cast<double>(i * i));
    tensors[name(dtype)] = tensor;
    tensors[concat("transposed ", dtype)] = as_strided(tensor, {3, 2}, {1, 3}, 0);
    tensors[concat("slice ", dtype)] = as_strided(tensor, {2, 2}, {3, 1}, 1);
    tensors[concat("empty ", dtype)] = empty({0, 3}, {.dtype = dtype});
    tensors[concat("scalar ", dtype)] = as_strided(tensor, {}, {}, 5);
  }
  tensors[""] = empty({1, 1, 1, 1, 1, 1, 1, 0});
  tensors["na\"me\n\u00e9"] = empty({0});
  const Metadata written{{"note", "\u00fc \\ \t"}, {"", ""}};
  save_safetensors(path("f"), tensors, written);
  Metadata metadata;
  const TensorMap loaded = load_safetensors(path("f"), Device::cpu(), &metadata);
  EXPECT_EQ(metadata, written);
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(loaded.contains(name)) << name;
    EXPECT_EQ(concat(describe(loaded.at(name))), concat(describe(tensor))) << name;
    EXPECT_EQ(loaded.at(name).to_vector(), tensor.to_vector()) << name;
    EXPECT_TRUE(loaded.at(name).is_contiguous()) << name;
  }
}

TEST_F(SafetensorsTest, RejectsSavingNoTensorsButLoadsFilesWithoutTensors) {
  EXPECT_ERROR(save_safetensors(path("f"), {}), "save_safetensors: there are no tensors");
  EXPECT_TRUE(load_safetensors(put("f", file_of("{}      ", ""))).empty());
}

TEST_F(SafetensorsTest, MetadataMayBeNull) {
  Metadata metadata{{"stale", "entry"}};
  const std::string header = "{\"__metadata__\":null,\"a\":" + entry("U8", "[1]", "[0,1]") + "}";
  EXPECT_EQ(load_safetensors(put("f", file_of(header, "\7")), Device::cpu(), &metadata).at("a").item(), 7);
  EXPECT_TRUE(metadata.empty());
}

TEST_F(SafetensorsTest, NamesTheActualFormatOfOtherFiles) {
  const std::pair<std::string, const char*> cases[] = {
      {std::string("PK\x03\x04\x14\0\0\0\x08\0", 10), "a zip archive, as torch.save"},
      {"PK\x03\x04\x14\x03\x08\x63 data", "a zip archive, as torch.save"},
      {"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20", "a Python pickle, as torch.save wrote before PyTorch 1.6"},
      {"\x80\x04\x95 pickle", "a Python pickle"},
      {"\x93NUMPY\x01 header", "NumPy's .npy"},
      {"\x89HDF\r\n\x1a\n data", "HDF5"},
      {"\x1f\x8b\x08 packed", "gzip"},
      {"GGUF\x03 and more", "GGUF"},
  };
  for (const auto& [bytes, format] : cases)
    EXPECT_ERROR(load_safetensors(put("f", bytes)), concat("not a safetensors file; it is ", format));
  std::string nifti = std::string("\x5c\x01\0\0", 4) + std::string(400, '\0');
  EXPECT_ERROR(load_safetensors(put("f", nifti)), "must begin with '{'; it is NIfTI-1");
}

TEST_F(SafetensorsTest, LoadsToEveryDevice) {
  const auto file = put("f", file_of(kPair, kPairData));
  for (const Device device : devices()) {
    const TensorMap tensors = load_safetensors(file, device);
    EXPECT_EQ(tensors.at("b").device(), device);
    EXPECT_EQ(tensors.at("b").to_vector(), (std::vector<double>{1.5, -2}));
    save_safetensors(path("g"), tensors);
    EXPECT_EQ(load_safetensors(path("g")).at("b").to_vector(), (std::vector<double>{1.5, -2}));
  }
  if (!cuda::is_available()) {
    EXPECT_ERROR(load_safetensors(file, Device::cuda()), "cuda:0");
  }
}

TEST_F(SafetensorsTest, RejectsWrongHeaderLengths) {
  EXPECT_ERROR(load_safetensors(put("f", "")), "truncated: a header has at least 8 bytes, but the file has 0");
  EXPECT_ERROR(load_safetensors(put("f", "1234567")), "truncated: a header has at least 8 bytes, but the file has 7");
  EXPECT_ERROR(load_safetensors(put("f", bytes_of(uint64_t{3}) + "{}")),
               "header length 3 exceeds the rest of the file, which has 2 bytes");
  EXPECT_ERROR(load_safetensors(put("f", bytes_of(uint64_t{100'000'001}) + "{}")), "exceeds 100000000 bytes");
  EXPECT_ERROR(load_safetensors(put("f", bytes_of(UINT64_MAX) + "{}")), "exceeds 100000000 bytes");
  EXPECT_ERROR(load_safetensors(put("f", file_of("", ""))), "must begin with '{'");
}

struct Malformed {
  std::string header;
  const char* message;
};

/// Malformed headers and a part of the expected error message. Each file has 8 bytes of data.
const Malformed kMalformed[] = {
    {" {}", "must begin with '{'"},
    {"\xef\xbb\xbf{}", "must begin with '{'"},
    {"[]", "must begin with '{'"},
    {"{}x", "must end with '}'"},
    {"{}\v", "must end with '}'"},
    {std::string("{}\0}", 4), "contains a zero byte"},
    {"{}}", "not valid JSON at byte"},
    {"{\"a\":}", "not valid JSON at byte"},
    {"{\"a\xff\":{}}", "not valid JSON at byte"},
    {"{\"a\":1}", "header entry 'a' must be an object, found a number"},
    {"{\"a\":-1}", "header entry 'a' must be an object, found a negative number"},
    {"{\"a\":[]}", "header entry 'a' must be an object, found an array"},
    {"{\"a\":null}", "header entry 'a' must be an object, found null"},
    {"{\"a\":{}}", "needs dtype, shape and data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "needs dtype, shape and data_offsets"},
    {"{\"a\":{\"dtype\":{\"x\":1}}}", "tensor 'a': dtype must be a string, found an object"},
    {"{\"a\":{\"dtype\":3}}", "tensor 'a': dtype must be a string, found a number"},
    {"{\"a\":{\"dtype\":[\"F32\"]}}", "tensor 'a': dtype must be a string, found an array"},
    {"{\"a\":{\"shape\":\"F32\"}}", "tensor 'a': shape must be an array, found a string"},
    {"{\"a\":{\"shape\":[1E999]}}", "the header is not valid JSON at byte"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", "tensor 'a': dtype occurs twice"},
    {"{\"a\":{\"shape\":[],\"shape\":[]}}", "tensor 'a': shape occurs twice"},
    {"{\"a\":{\"data_offsets\":[0,8],\"data_offsets\":[0,8]}}", "tensor 'a': data_offsets occurs twice"},
    {"{\"a\":{\"device\":\"cpu\"}}", "tensor 'a': unknown key 'device'"},
    {"{\"a\":" + entry("F33", "[2]", "[0,8]") + "}", "tensor 'a': dtype 'F33' is not supported"},
    {"{\"a\":" + entry("F8_E4M3", "[8]", "[0,8]") + "}", "tensor 'a': dtype 'F8_E4M3' is not supported"},
    {"{\"a\":" + entry("F32", "[-2]", "[0,8]") + "}",
     "shape must contain non-negative integers, found a negative number"},
    {"{\"a\":" + entry("F32", "[2.0]", "[0,8]") + "}",
     "non-negative integers, found a number that is not a 64-bit integer"},
    {"{\"a\":" + entry("F32", "[[2]]", "[0,8]") + "}", "shape must contain non-negative integers, found an array"},
    {"{\"a\":" + entry("F32", "[true]", "[0,8]") + "}", "non-negative integers, found a boolean"},
    {"{\"a\":" + entry("F32", "[99999999999999999999]", "[0,8]") + "}",
     "shape must contain non-negative integers, found a"},
    {"{\"a\":" + entry("F32", "[9223372036854775808]", "[0,8]") + "}", "does not fit in 64 bits"},
    {"{\"a\":" + entry("F32", "[4294967296,4294967296]", "[0,8]") + "}",
     "tensor 'a': the number of bits of [4294967296, 4294967296] F32 does not fit in 64 bits"},
    {"{\"a\":" + entry("F32", "[0,4294967296,4294967296]", "[0,8]") + "}", "F32 does not fit in 64 bits"},
    {"{\"a\":" + entry("F32", "[4611686018427387904]", "[0,8]") + "}", "F32 does not fit in 64 bits"},
    {"{\"a\":" + entry("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", "more than 8 axes"},
    {"{\"a\":" + entry("F32", "[2]", "[0]") + "}", "must be two numbers"},
    {"{\"a\":" + entry("F32", "[2]", "[0,8,8]") + "}", "must be two numbers"},
    {"{\"a\":" + entry("F32", "[2]", "[8,0]") + "}",
     "data_offsets [8, 0] do not lie within the data, which has 8 bytes"},
    {"{\"a\":" + entry("F32", "[2]", "[0,9]") + "}",
     "data_offsets [0, 9] do not lie within the data, which has 8 bytes"},
    {"{\"a\":" + entry("F32", "[3]", "[0,8]") + "}",
     "tensor 'a': [3] F32 takes 12 bytes, but data_offsets [0, 8] contain 8"},
    {"{\"a\":" + entry("F32", "[1]", "[4,8]") + "}", "tensor 'a': the data has a gap at bytes 0 to 4"},
    {"{\"a\":" + entry("F32", "[1]", "[0,4]") + "}", "trailing bytes"},
    {"{\"a\":" + entry("U8", "[3]", "[0,3]") + ",\"b\":" + entry("U8", "[4]", "[4,8]") + "}",
     "tensor 'b': the data has a gap at bytes 3 to 4"},
    {"{\"a\":" + entry("U8", "[5]", "[0,5]") + ",\"b\":" + entry("U8", "[4]", "[4,8]") + "}", "overlap"},
    {"{\"a\":" + entry("U8", "[8]", "[0,8]") + ",\"b\":" + entry("U8", "[8]", "[0,8]") + "}", "overlap"},
    {"{\"a\":" + entry("U8", "[8]", "[0,8]") + ",\"a\":" + entry("U8", "[8]", "[0,8]") + "}",
     "header entry 'a' occurs twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", "'__metadata__' occurs twice"},
    {"{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", "metadata 'a' occurs twice"},
    {"{\"__metadata__\":{\"a\":1}}", "metadata 'a' must be a string, found a number"},
    {"{\"__metadata__\":{\"a\":{}}}", "metadata 'a' must be a string, found an object"},
    {"{\"__metadata__\":3}", "must be an object, found a number"},
    {"{}", "trailing bytes: the tensors take 0 bytes, but the data has 8"},
};

TEST_F(SafetensorsTest, RejectsMalformedHeaders) {
  for (const auto& [header, message] : kMalformed) {
    SCOPED_TRACE(header);
    const auto file = put("f", file_of(header, std::string(8, '\1')));
    EXPECT_ERROR(load_safetensors(file), message);
    EXPECT_ERROR(load_safetensors(file), "load_safetensors: '" + file.string() + "': ");
  }
}

TEST_F(SafetensorsTest, RejectsBoolsOtherThanZeroAndOne) {
  const std::string header = "{\"a\":" + entry("BOOL", "[3]", "[0,3]") + "}";
  EXPECT_ERROR(load_safetensors(put("f", file_of(header, std::string("\0\1\2", 3)))),
               "tensor 'a': a bool must be 0 or 1, found 2");
}

TEST_F(SafetensorsTest, ChecksSizesBeforeAllocating) {
  const std::string header = "{\"a\":" + entry("F32", "[1099511627776]", "[0,4398046511104]") + "}";
  const int64_t allocations = memory::stats().allocations;
  EXPECT_ERROR(load_safetensors(put("f", file_of(header, "12345678"))),
               "do not lie within the data, which has 8 bytes");
  EXPECT_EQ(memory::stats().allocations, allocations);
}

TEST_F(SafetensorsTest, RespectsMaxBytes) {
  save_safetensors(path("f"), {{"a", ones({300})}, {"b", ones({700})}});
  const int64_t allocations = memory::stats().allocations;
  EXPECT_ERROR(
      load_safetensors(path("f"), Device::cpu(), nullptr, {.max_bytes = 3999}),
      "'" + path("f").string() + "': loading all tensors takes 4000 bytes, more than max_bytes, which is 3999");
  EXPECT_ERROR(load_safetensors(path("f"), Device::cpu(), nullptr, {.max_bytes = 50}), "the header takes");
  EXPECT_EQ(memory::stats().allocations, allocations);
  EXPECT_EQ(load_safetensors(path("f"), Device::cpu(), nullptr, {.max_bytes = 4000}).size(), 2u);
}

TEST_F(SafetensorsTest, ChecksumDetectsEveryFlippedBit) {
  const Tensor wide = full({2}, 0.5), narrow = full({3}, 7, {.dtype = u8});
  save_safetensors(path("f"), {{"w", wide}, {"n", narrow}, {"e", empty({0})}}, {{"k", "v"}}, {.checksum = true});
  Metadata metadata;
  EXPECT_EQ(load_safetensors(path("f"), Device::cpu(), &metadata).at("n").to_vector(), narrow.to_vector());
  EXPECT_EQ(metadata, (Metadata{{"k", "v"}}));
  EXPECT_TRUE(read_safetensors(path("f"), Device::cpu(), {}, "test").has_checksum);
  // The checksum must not change between versions.
  EXPECT_NE(get(path("f")).find("\"voxgrad.crc32\":\"f6efab0d\""), std::string::npos);
  const std::string bytes = get(path("f"));
  const size_t key = bytes.find("voxgrad.crc32");
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    put("f", damaged);
    if (bit / 8 >= key && bit / 8 < key + 13) continue;  // a damaged key means that the file has no checksum
    EXPECT_THROW(load_safetensors(path("f")), Error) << "byte " << bit / 8;
  }
  std::string damaged = bytes;
  damaged.back() ^= 1;
  EXPECT_ERROR(load_safetensors(put("f", damaged)),
               "load_safetensors: '" + path("f").string() + "': the file is damaged: its contents have the checksum ");

  // The checksum does not depend on the order of the tensors in the file, but on their names, shapes and dtypes.
  const auto in_other_order = [&](const std::string& narrow_name, const std::string& shape, const std::string& dtype) {
    const std::string header = "{\"" + narrow_name + "\":" + entry("U8", shape, "[0,3]") +
                               ",\"w\":" + entry(dtype, "[2]", "[3,11]") + ",\"e\":" + entry("F32", "[0]", "[11,11]") +
                               ",\"__metadata__\":{\"voxgrad.crc32\":\"" + bytes.substr(key + 16, 8) +
                               "\",\"k\":\"v\"}}";
    return load_safetensors(put("f", file_of(header, "\7\7\7" + bytes_of(0.5f) + bytes_of(0.5f)))).size();
  };
  EXPECT_EQ(in_other_order("n", "[3]", "F32"), 3u);
  EXPECT_ERROR(in_other_order("m", "[3]", "F32"), "the file is damaged");
  EXPECT_ERROR(in_other_order("n", "[1,3]", "F32"), "the file is damaged");
  EXPECT_ERROR(in_other_order("n", "[3]", "I32"), "the file is damaged");
}

TEST_F(SafetensorsTest, RejectsPathsThatAreNotRegularFiles) {
  EXPECT_ERROR(load_safetensors(path("none")),
               "load_safetensors: cannot read '" + path("none").string() + "': No such file or directory");
  EXPECT_ERROR(load_safetensors(path("")), "it is a directory");
  EXPECT_ERROR(load_safetensors("/dev/null"), "it is not a regular file");
}

TEST_F(SafetensorsTest, RejectsUnreadableFiles) {
  if (geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const auto file = put("f", file_of(kPair, kPairData));
  std::filesystem::permissions(file, std::filesystem::perms::none);
  EXPECT_ERROR(load_safetensors(file), "cannot read '" + file.string() + "': Permission denied");
}

TEST_F(SafetensorsTest, SaveRejectsContentsThatLoadWouldReject) {
  EXPECT_ERROR(save_safetensors(path("f"), {{"a", Tensor()}}), "tensor 'a' is undefined");
  EXPECT_ERROR(save_safetensors(path("f"), {{"__metadata__", empty({1})}}), "no tensor may be named");
  EXPECT_ERROR(save_safetensors(path("f"), {{"a\xff", empty({1})}}), "the name of tensor 'a\xff' must be UTF-8");
  EXPECT_ERROR(save_safetensors(path("f"), {{"a", empty({1})}}, {{"k", "v\xff"}}), "metadata 'v\xff' must be UTF-8");
  EXPECT_ERROR(save_safetensors(path("f"), {{"a", empty({1})}}, {{"voxgrad.crc32", ""}}),
               "no metadata key may be voxgrad.crc32");
  EXPECT_ERROR(save_safetensors(path("none/f"), {{"a", empty({1})}}), "No such file or directory");
  EXPECT_EQ(file_count(), 0);
}

TEST_F(SafetensorsTest, ThrowsOnlyErrorForDamagedFiles) {
  expect_loads_or_rejects_damaged("f", file_of(kPair, kPairData),
                                  [](const auto& file) { return load_safetensors(file); });
}

TEST_F(SafetensorsTest, MapsFilesPrivately) {
  Tensor tensor = zeros({4});
  save_safetensors(path("f"), {{"x", tensor}}, {}, {.checksum = true});
  tensor = load_safetensors(path("f")).at("x");
  EXPECT_TRUE(is_mapped(path("f")));
  tensor.set({0}, 1);
  EXPECT_EQ(load_safetensors(path("f")).at("x").to_vector(), std::vector<double>(4, 0));
  save_safetensors(path("f"), {{"x", zeros({1})}});  // replaces the file
  EXPECT_EQ(tensor.to_vector(), (std::vector<double>{1, 0, 0, 0}));
  tensor = {};
  EXPECT_FALSE(is_mapped(path("f")));
}

}  // namespace
}  // namespace voxgrad
