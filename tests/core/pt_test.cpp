// Tests of checkpoints: files that PyTorch wrote (tests/core/data/make_pt.py), handwritten pickles, and damaged files.
#include "core/io/pt.h"

#include <functional>
#include <random>

#include "ops/create.h"
#include "tests/core/file_support.h"
#include "tests/core/zip_support.h"

namespace voxgrad {
namespace {

using Kind = PtValue::Kind;
using Values = std::vector<double>;

const std::filesystem::path kFolder = TESTS_DIR "/core/data";
constexpr const char* kFiles[] = {"dtypes.pt",   "unsupported.pt", "views.pt",  "values_2.pt", "values_3.pt",
                                  "values_4.pt", "values_5.pt",    "module.pt", "cycle.pt"};

// ---- parts of handwritten pickles: each function returns the instructions that push a value on the stack

std::string text(const std::string& value) { return "X" + little_endian(static_cast<uint32_t>(value.size())) + value; }
std::string integer(int64_t value) { return "\x8a\x08" + little_endian(value); }
std::string tuple(const std::string& items) { return "(" + items + "t"; }
std::string global(const std::string& module, const std::string& name) { return "c" + module + "\n" + name + "\n"; }
std::string call(const std::string& module, const std::string& name, const std::string& arguments) {
  return global(module, name) + tuple(arguments) + "R";
}
std::string integers(const std::vector<int64_t>& values) {
  std::string items;
  for (const int64_t value : values) items += integer(value);
  return tuple(items);
}
std::string storage(const std::string& key, int64_t numel, const std::string& type = "FloatStorage") {
  return tuple(text("storage") + global("torch", type) + text(key) + text("cpu") + integer(numel)) + "Q";
}
std::string tensor(const std::string& from, int64_t offset, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& strides) {
  return call(
      "torch._utils", "_rebuild_tensor_v2",
      from + integer(offset) + integers(shape) + integers(strides) + "\x89" + call("collections", "OrderedDict", ""));
}
/// Returns `count` copies of `part`.
std::string repeated(const std::string& part, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += part;
  return all;
}

class PtTest : public FileTest {
 protected:
  /// Writes a checkpoint with the storages "0" (the floats 0 to 5) and "1" (four bytes with the values 0, 1, 2, 1).
  std::filesystem::path checkpoint(const std::string& pickle) const {
    std::string floats;
    for (int i = 0; i < 6; ++i) floats += little_endian(static_cast<float>(i));
    return put("f.pt", zip_of({{"a/data.pkl", pickle + "."},
                               {"a/byteorder", "little"},
                               {"a/data/0", floats},
                               {"a/data/1", std::string("\0\1\2\1", 4)}}));
  }
};

// ---- files of PyTorch

TEST_F(PtTest, ReadsEveryDtypeThatVoxgradHas) {
  const TensorMap tensors = load_pt(kFolder / "dtypes.pt");
  EXPECT_EQ(tensors.size(), 8u);
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(tensor.dtype(), parse_dtype(name));
    EXPECT_EQ(tensor.shape(), (Shape{2, 3}));
    EXPECT_EQ(tensor.to_vector(), name == "bool" ? (Values{1, 0, 1, 0, 0, 1}) : (Values{0, 1, 2, 3, 100, 5})) << name;
  }
}

TEST_F(PtTest, RejectsTensorsOfOtherDtypesOnlyWhenTheyAreLoaded) {
  const PtValue root = open_pt(kFolder / "unsupported.pt");
  for (const auto& [key, value] : root.members()) EXPECT_EQ(value.kind(), Kind::tensor) << key.text();
  EXPECT_EQ(root.at("float32").tensor().to_vector(), (Values{1, 1}));
  EXPECT_ERROR(root.at("int16").tensor(), "tensor 'int16' cannot be loaded: elements of 'torch.ShortStorage'");
  EXPECT_ERROR(root.at("complex64").tensor(), "elements of 'torch.ComplexFloatStorage' are not supported");
  EXPECT_ERROR(root.at("uint16").tensor(), "dtype 'torch.uint16' is not supported");
  EXPECT_ERROR(root.at("float8").tensor(), "dtype 'torch.float8_e4m3fn' is not supported");
  EXPECT_ERROR(root.at("negated").tensor(), "lazily negated");
  EXPECT_ERROR(root.at("axes").tensor(), "9 axes are not supported");
  EXPECT_ERROR(root.tensors(), "tensor 'axes' cannot be loaded");
  EXPECT_ERROR(load_pt(kFolder / "unsupported.pt"), "load_pt: '" + (kFolder / "unsupported.pt").string() + "': tensor");
}

TEST_F(PtTest, ReadsViewsWithTheirStridesAndOffsets) {
  for (const Device device : devices()) {
    const TensorMap tensors = load_pt(kFolder / "views.pt", device);
    const Tensor& base = tensors.at("base");
    EXPECT_EQ(base.device(), device);
    EXPECT_EQ(base.at({1, 2, 3}), 23);
    EXPECT_EQ(tensors.at("transposed").strides(), (Strides{1, 4, 12}));
    EXPECT_EQ(tensors.at("transposed").to_vector(), base.transpose(0, 2).to_vector());
    EXPECT_EQ(tensors.at("part").to_vector(), (Values{16, 18, 20, 22}));
    EXPECT_EQ(tensors.at("expanded").shape(), (Shape{3, 4}));
    EXPECT_EQ(tensors.at("expanded").at({2, 3}), 0);
    EXPECT_TRUE(tensors.at("channels_last").is_contiguous(MemoryFormat::channels_last));
    EXPECT_EQ(tensors.at("channels_last").at({0, 1, 0, 1, 1}), 11);
    EXPECT_EQ(tensors.at("scalar").shape(), Shape());
    EXPECT_EQ(tensors.at("scalar").item<int64_t>(), 7);
    EXPECT_EQ(tensors.at("empty").shape(), (Shape{0, 3}));
    EXPECT_EQ(tensors.at("list.0").to_vector(), (Values{1.5, 2.5}));
    EXPECT_FALSE(tensors.at("parameter").requires_grad());
    EXPECT_EQ(tensors.at("list.1.0").shape(), (Shape{3, 4}));
    for (const char* name : {"same", "transposed", "part", "expanded", "list.1.0"})
      EXPECT_EQ(tensors.at(name).storage(), base.storage()) << name;
    EXPECT_EQ(tensors.at("parameter").storage(), tensors.at("list.0").storage());
  }
}

TEST_F(PtTest, KeepsAStorageInMemoryOnlyWhileATensorUsesIt) {
  const PtValue root = open_pt(kFolder / "views.pt");
  const int64_t before = memory::stats().current;
  {
    const Tensor base = root.at("base").tensor();
    const int64_t used = memory::stats().current;
    EXPECT_EQ(root.at("part").tensor().storage(), base.storage());
    EXPECT_EQ(root.at("transposed").tensor().storage(), base.storage());
    EXPECT_EQ(memory::stats().current, used);
  }
  EXPECT_EQ(memory::stats().current, before);
  EXPECT_EQ(root.at("part").tensor().to_vector(), (Values{16, 18, 20, 22}));
}

TEST_F(PtTest, ReadsValuesOfAllKindsInAllProtocols) {
  for (const char* name : {"values_2.pt", "values_3.pt", "values_4.pt", "values_5.pt"}) {
    const PtValue root = open_pt(kFolder / name);
    EXPECT_EQ(root.kind(), Kind::dict);
    EXPECT_EQ(root.members().front().first.text(), "none");
    EXPECT_TRUE(root.at("none").is_none());
    EXPECT_TRUE(root.at("bools").items()[0].boolean());
    EXPECT_FALSE(root.at("bools").items()[1].boolean());
    const std::vector<int64_t> expected{0, 255, 65535, -1, int64_t{1} << 31, INT64_MIN, INT64_MAX};
    const auto found = root.at("integers").items();
    ASSERT_EQ(found.size(), 8u);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(found[i].integer(), expected[i]);
    EXPECT_ERROR(found[7].integer(), "'integers.7': expected an integer, found an object of class 'int'");
    EXPECT_EQ(root.at("numbers").kind(), Kind::tuple);
    EXPECT_EQ(root.at("numbers").items()[0].number(), 0.1);
    EXPECT_EQ(root.at("numbers").items()[1].number(), std::numeric_limits<double>::infinity());
    EXPECT_EQ(root.at("numbers").items()[2].number(), -1e300);
    EXPECT_EQ(found[1].number(), 255);
    EXPECT_EQ(root.at("text").text(), "r\u00e9sum\u00e9 \U0001f600");
    EXPECT_EQ(root.at("long text").text(), std::string(300, 'x'));
    EXPECT_EQ(root.at("bytes").kind(), Kind::bytes);
    EXPECT_EQ(root.at("bytes").text(), std::string("\x00\x7f\x80\xff", 4));
    EXPECT_EQ(root.at("nested").members()[1].first.integer(), 3);
    EXPECT_EQ(root.at("shared").items()[1].items()[1].text(), "two");
    EXPECT_EQ(root.at("size").kind(), Kind::tuple);
    EXPECT_EQ(root.at("size").items()[1].integer(), 3);
    EXPECT_EQ(root.at("device").text(), "cuda:1");
    EXPECT_EQ(root.at("cpu").text(), "cpu");
    EXPECT_EQ(root.at("dtype").text(), "torch.float16");
    EXPECT_EQ(root.at("object").kind(), Kind::object);
    EXPECT_EQ(root.at("set").kind(), Kind::object);
    EXPECT_EQ(root.at("array").kind(), Kind::object);
    const TensorMap tensors = root.tensors();
    EXPECT_EQ(tensors.size(), 4u);
    EXPECT_EQ(tensors.at("nested.a.0.b.0").to_vector(), (Values{1}));
    EXPECT_EQ(tensors.at("nested.3").to_vector(), (Values{0, 0}));
    EXPECT_EQ(tensors.at("state.weight").shape(), (Shape{1, 2}));
    EXPECT_EQ(root.at("state").tensors().at("bias").shape(), Shape{1});
  }
}

TEST_F(PtTest, ReadsScalarsOfNumPyAsNumbers) {
  for (const char* name : {"values_2.pt", "values_3.pt", "values_4.pt", "values_5.pt"}) {
    const auto items = open_pt(kFolder / name).at("numpy").items();
    EXPECT_EQ(items[0].number(), 0.25);
    EXPECT_EQ(items[1].number(), 0.5);
    EXPECT_EQ(items[2].number(), 1.5);
    EXPECT_EQ(items[3].integer(), -5);
    EXPECT_EQ(items[4].integer(), -7);
    EXPECT_EQ(items[5].integer(), 200);
    EXPECT_EQ(items[6].kind(), Kind::object);  // 2^64 - 1 does not fit in int64_t
    EXPECT_TRUE(items[7].boolean());
    EXPECT_EQ(items[8].kind(), Kind::object);
  }
}

TEST_F(PtTest, NamesTheFileTheKeysAndBothKindsInErrors) {
  const auto path = kFolder / "values_2.pt";
  const PtValue root = open_pt(path);
  const std::string start = "open_pt: '" + path.string() + "': ";
  EXPECT_ERROR(root.text(), start + "expected a text, found a dict");
  EXPECT_ERROR(root.at("nested").at("a").items()[0].at("b").items()[1].tensor(),
               start + "'nested.a.0.b.1': expected a tensor, found a list");
  EXPECT_ERROR(root.at("text").items(), "'text': expected a list or tuple, found a text");
  EXPECT_ERROR(root.at("text").find("x"), "'text': expected a dict, found a text");
  EXPECT_ERROR(root.at("text").number(), "'text': expected a number, found a text");
  EXPECT_ERROR(root.at("numbers").items()[0].integer(), "'numbers.0': expected an integer, found a number");
  EXPECT_ERROR(root.at("none").boolean(), "'none': expected a bool, found None");
  EXPECT_ERROR(root.at("object").members(), "found an object of class 'pathlib");
  EXPECT_ERROR(root.at("nested").at("c"), start + "there is no key 'nested.c'");
  EXPECT_TRUE(root.find("missing").is_none());
  EXPECT_EQ(root.find("text").kind(), Kind::text);
}

TEST_F(PtTest, TurnsAWholeModuleIntoAnObject) {
  EXPECT_EQ(open_pt(kFolder / "module.pt").kind(), Kind::object);
  EXPECT_TRUE(open_pt(kFolder / "module.pt").tensors().empty());
  EXPECT_ERROR(load_pt(kFolder / "module.pt"),
               "an object of class 'torch.nn.modules.container.Sequential', not tensors");
}

TEST_F(PtTest, SkipsAListInsideItself) {
  const PtValue root = open_pt(kFolder / "cycle.pt");
  EXPECT_EQ(root.items()[1].items()[1].items()[0].tensor().to_vector(), (Values{1, 1}));
  EXPECT_EQ(root.tensors().size(), 1u);
  EXPECT_EQ(load_pt(kFolder / "cycle.pt").at("0").to_vector(), (Values{1, 1}));
}

TEST_F(PtTest, RejectsOtherFormatsByName) {
  EXPECT_ERROR(open_pt(kFolder / "legacy.pt"), "as torch.save wrote before PyTorch 1.6");
  EXPECT_ERROR(open_pt(kFolder / "script.pt"), "TorchScript archives are not supported");
  EXPECT_ERROR(open_pt(put("f", "")), "not a zip archive");
  EXPECT_ERROR(open_pt(put("f", "\x89HDF\r\n\x1a\n")), "it is HDF5");
  EXPECT_ERROR(open_pt(path("missing")), "cannot read");
  EXPECT_ERROR(open_pt(put("f", zip_of({{"arr_0.npy", "x"}}))), "contains no data.pkl");
  EXPECT_ERROR(open_pt(put("f", zip_of({{"a/data.pkl", "N."}, {"b/data.pkl", "N."}}))), "two files named data.pkl");
  EXPECT_ERROR(open_pt(put("f", zip_of({{"a/data.pkl", "N."}, {"a/data.pkl", "N."}}))), "occurs twice");
  EXPECT_ERROR(open_pt(put("f", zip_of({{"a/data.pkl", "N.", 8}}))), "entry 'a/data.pkl' is compressed or encrypted");
  EXPECT_ERROR(open_pt(put("f", zip_of({{"a/data.pkl", "N."}, {"a/byteorder", "big"}}))),
               "the byte order of the elements must be little, found 'big'");
}

TEST_F(PtTest, LimitsTheBytesThatItLoads) {
  const auto path = kFolder / "views.pt";
  EXPECT_ERROR(load_pt(path, Device::cpu(), {.max_bytes = 300}), "more than max_bytes, which is 300");
  const PtValue root = open_pt(checkpoint(tensor(storage("0", 6), 0, {1000}, {0})), {.max_bytes = 3999});
  EXPECT_ERROR(root.tensor(), "takes 4000 bytes, more than max_bytes, which is 3999");
}

// ---- handwritten pickles

TEST_F(PtTest, LoadsATensorAtTheTopUnderAnEmptyName) {
  const TensorMap tensors = load_pt(checkpoint(tensor(storage("0", 6), 1, {2}, {3})));
  EXPECT_EQ(tensors.at("").to_vector(), (Values{1, 4}));
}

TEST_F(PtTest, ReadsInstructionsOfProtocol1) {
  const PtValue root = open_pt(checkpoint("(lI01\naI00\naI12\naL-34L\naL99999999999999999999L\na"));
  EXPECT_TRUE(root.items()[0].boolean());
  EXPECT_FALSE(root.items()[1].boolean());
  EXPECT_EQ(root.items()[2].integer(), 12);
  EXPECT_EQ(root.items()[3].integer(), -34);
  EXPECT_EQ(root.items()[4].kind(), Kind::object);
}

TEST_F(PtTest, NeverCallsUnknownClassesAndDiscardsTheirState) {
  const std::string command = call("os", "system", text("touch " + path("called").string()));
  EXPECT_EQ(open_pt(checkpoint(command)).kind(), Kind::object);
  EXPECT_EQ(open_pt(checkpoint(global("os", "system") + tuple(text("x")) + "\x81}b")).kind(), Kind::object);
  EXPECT_EQ(open_pt(checkpoint(global("a", "B") + ")}\x92")).kind(), Kind::object);
  EXPECT_EQ(open_pt(checkpoint(call("a", "B", "") + "(NNu(NeNa" + text("k") + "Ns}b")).kind(), Kind::object);
  EXPECT_EQ(open_pt(checkpoint(text("os") + text("system") + "\x93")).kind(), Kind::object);
  EXPECT_FALSE(std::filesystem::exists(path("called")));
}

TEST_F(PtTest, RejectsTensorsOutsideTheirStorage) {
  constexpr int64_t kMax = INT64_MAX;
  struct Case {
    int64_t offset;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
  };
  const Case cases[] = {{6, {1}, {1}},
                        {0, {7}, {1}},
                        {-1, {1}, {1}},
                        {1, {2, 3}, {3, 1}},
                        {0, {2}, {-1}},
                        {5, {2}, {-1}},
                        {kMax, {2}, {1}},
                        {0, {2}, {kMax}},
                        {0, {-1}, {1}},
                        {0, {kMax, kMax}, {0, 0}},
                        {0, {2, 2}, {kMax, kMax}},
                        {0, {kMax}, {1}},
                        {0, {kMax}, {kMax}},
                        {0, {INT64_MIN}, {INT64_MIN}}};
  for (const auto& [offset, shape, strides] : cases)
    EXPECT_THROW(open_pt(checkpoint(tensor(storage("0", 6), offset, shape, strides))), Error)
        << offset << Shape(shape) << Strides(strides);
  EXPECT_ERROR(open_pt(checkpoint(tensor(storage("0", 6), 4, {3}, {1}))),
               "a tensor in storage '0': shape [3] with strides [1] at offset 4 reaches outside the storage, whose "
               "number of elements is 6");
  EXPECT_ERROR(open_pt(checkpoint(tensor(storage("0", 6), 0, {2, 3}, {1}))), "needs a stride for each axis");
}

TEST_F(PtTest, RejectsStoragesThatDifferFromTheirEntries) {
  EXPECT_ERROR(open_pt(checkpoint(storage("2", 6))), "entry 'a/data/2' is missing");
  EXPECT_ERROR(open_pt(checkpoint(storage("0", 5))), "should have 5 elements of f32, but its entry has 24 bytes");
  EXPECT_ERROR(open_pt(checkpoint(storage("0", INT64_MAX))), "should have");
  EXPECT_ERROR(open_pt(checkpoint(storage("0", -1))), "wrong key or size");
  EXPECT_ERROR(open_pt(checkpoint(storage("0", 6) + storage("0", 6, "IntStorage") + "\x86")), "has two types or sizes");
  EXPECT_ERROR(open_pt(checkpoint(storage("../data.pkl", 1, "ByteStorage"))), "is missing");
  EXPECT_ERROR(open_pt(checkpoint(storage("0", 6, "Tensor"))), "'torch.Tensor' is not a type of storage");
  EXPECT_ERROR(open_pt(checkpoint("NQ")), "a persistent id must be a tuple, found None");
  EXPECT_ERROR(open_pt(checkpoint(tuple(text("module") + "NNNN") + "Q")), "unknown persistent id");
  EXPECT_ERROR(load_pt(checkpoint(tensor(storage("1", 4, "BoolStorage"), 0, {4}, {1}))),
               "storage '1': a bool must be 0 or 1, found 2");
}

TEST_F(PtTest, RejectsMalformedPickles) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "a value is missing on the stack"},
      {"\xff", "unknown instruction 255"},
      {"\x80\x06", "unknown protocol"},
      {"h\x01", "a memo entry is missing"},
      {"t", "a mark is missing on the stack"},
      {"N(\x85", "values are missing on the stack"},
      {"\x86", "values are missing on the stack"},
      {"]}(NNNu", "the value of a key is missing"},
      {"NNa", "items cannot be added to None"},
      {"N)R", "expected a class or function, found None"},
      {global("a", "B") + "NR", "arguments must be a tuple, found None"},
      {call("torch._utils", "_rebuild_tensor_v2", ""), "has too few or too many arguments"},
      {call("torch._utils", "_rebuild_tensor_v2", "NNNN"), "a tensor needs a storage, found None"},
      {call("torch", "device", "N"), "the type of a device must be a text, found None"},
      {call("_codecs", "encode", text("\xc4\x80") + text("latin1")), "a text is not latin-1"},
      {"Iabc\n", "expected an integer, found 'abc'"},
      {"cos", "a line has no end"},
      {std::string("\x95\xff\xff\0\0\0\0\0\0", 9), "a frame is truncated"},
      {"X\xff\xff\xff\xff", "it is truncated, or a length is wrong"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "it is truncated, or a length is wrong"},
      {"\x8b\xff\xff\xff\xff", "it is truncated, or a length is wrong"},
  };
  for (const auto& [pickle, message] : cases) EXPECT_ERROR(open_pt(checkpoint(pickle)), message);
}

TEST_F(PtTest, RejectsNamesThatAreNotUnique) {
  const std::string x = tensor(storage("0", 6), 0, {6}, {1});
  EXPECT_ERROR(load_pt(checkpoint("}" + text("a.b") + x + "s" + text("a") + "}" + text("b") + x + "ss")),
               "two tensors have the name 'a.b'");
  EXPECT_ERROR(load_pt(checkpoint("})" + x + "s")), "has a key that is a tuple, not a text or integer");
}

// ---- hostile pickles

TEST_F(PtTest, LimitsNestedContainersThatShareItems) {
  // Lists with 12 levels, where each list contains the list of the level below 10 times: 10^12 paths lead to the
  // tensor.
  std::string laughs = tensor(storage("0", 6), 0, {6}, {1}) + "q" + std::string(1, '\0');
  for (char level = 0; level < 12; ++level)
    laughs += "](" + repeated("h" + std::string(1, level), 10) + "eq" + std::string(1, static_cast<char>(level + 1));
  EXPECT_ERROR(load_pt(checkpoint(laughs)), "more than 1000000 tensors");
  EXPECT_ERROR(load_pt(checkpoint("N" + laughs.substr(laughs.find("q")))), "more than 10000000 values");
  // Nested dicts with the same long key at each level.
  std::string keys = text(std::string(100'000, 'k')) + "q\x01" + tensor(storage("0", 6), 0, {6}, {1});
  for (int level = 0; level < 900; ++level) keys += "q\x02}h\x01h\x02s";
  EXPECT_ERROR(load_pt(checkpoint(keys)), "the names of the tensors take more than 64000000 bytes");
}

TEST_F(PtTest, HandlesDeepNestingWithoutRecursion) {
  const int depth = 1'000'000;
  for (const std::string& pickle : {repeated("]", depth) + repeated("a", depth - 1), "N" + repeated("\x85", depth),
                                    repeated("(", depth) + "N" + repeated("t", depth)}) {
    const PtValue root = open_pt(checkpoint(pickle));
    EXPECT_ERROR(root.tensors(), "containers have more than 1000 levels");
  }
  PtValue value = open_pt(checkpoint("N" + repeated("\x85", 10'000)));
  while (!value.is_none()) value = value.items()[0];
}

TEST_F(PtTest, LimitsValuesAndDerivedTexts) {
  EXPECT_ERROR(open_pt(checkpoint(repeated("]", 4'100'000))), "more than 4000000 values");
  // Each of these instructions would copy a long text again.
  const std::string long_text = text(std::string(1'000'000, 'x')) + "q\x01";
  EXPECT_ERROR(open_pt(checkpoint(long_text + repeated("h\x01h\x01\x93", 100))), "more than four times its size");
  EXPECT_ERROR(open_pt(checkpoint(long_text + global("_codecs", "encode") + "q\x02" + "0(h\x01" + text("latin1") +
                                  "tq\x03" + repeated("h\x02h\x03R", 100))),
               "more than four times its size");
  EXPECT_ERROR(open_pt(checkpoint(long_text + global("torch", "device") + "h\x01\x85R")), "unknown device");
}

TEST_F(PtTest, AcceptsTheLargestMemoKey) {
  const std::string key = little_endian(uint32_t{0xffff'ffff});
  EXPECT_EQ(open_pt(checkpoint(text("x") + "r" + key + "0j" + key)).text(), "x");
}

// ---- damaged files

/// Loads everything in a file.
void load_all(const std::filesystem::path& path) {
  open_pt(path).tensors();
  load_pt(path);
}

TEST_F(PtTest, RejectsTruncationAtEveryByte) {
  for (const char* name : {"views.pt", "values_4.pt"}) {
    const std::string bytes = get(kFolder / name);
    for (size_t size = 0; size < bytes.size(); ++size)
      EXPECT_THROW(load_all(put("f", bytes.substr(0, size))), Error) << name << " cut to " << size << " bytes";
  }
}

TEST_F(PtTest, ThrowsOnlyErrorForChangedBytes) {
  std::mt19937 random(1);
  const int64_t before = memory::stats().current;
  memory::reset_peak();
  for (const char* name : kFiles) {
    const std::string bytes = get(kFolder / name);
    for (int variant = 0; variant < 200; ++variant) {
      std::string damaged = bytes;
      for (uint32_t i = 0, count = 1 + random() % 4; i < count; ++i)
        damaged[random() % damaged.size()] = static_cast<char>(random());
      try {
        load_all(put("f", damaged));
      } catch (const OutOfMemoryError& error) {
        ADD_FAILURE() << name << ": " << error.what();
      } catch (const Error&) {
      }
    }
  }
  EXPECT_LE(memory::stats().peak - before, 1'000'000);
}

TEST_F(PtTest, RejectsEntriesThatShareBytes) {
  std::vector<ZipEntry> entries{{"a/data.pkl", "N."}};
  for (int i = 0; i < 10; ++i) entries.push_back({concat("a/data/", i), std::string(1000, 'x')});
  std::string bytes = zip_of(entries);
  ASSERT_NO_THROW(open_pt(put("f", bytes)));
  // The sizes in the directory add up to more than the file.
  const size_t size_field = bytes.find("PK\x01\x02") + 20;
  bytes.replace(size_field, 8, little_endian(uint32_t{11'000}) + little_endian(uint32_t{11'000}));
  EXPECT_ERROR(open_pt(put("f", bytes)), "is outside the file or overlaps another");
}

TEST_F(PtTest, ReadsDirectoriesInZip64Format) {
  // PyTorch writes a zip64 end record in each file. Readers use this record if the 32-bit fields contain 0xff bytes.
  std::string bytes = get(kFolder / "cycle.pt");
  const size_t end = bytes.rfind("PK\x05\x06");
  const size_t locator = bytes.rfind("PK\x06\x07");
  ASSERT_EQ(locator + 20, end);
  bytes.replace(end + 8, 12, std::string(12, '\xff'));
  EXPECT_EQ(load_pt(put("f", bytes)).size(), 1u);
  bytes.replace(locator + 8, 8, little_endian(uint64_t{1} << 63));
  EXPECT_ERROR(open_pt(put("f", bytes)), "the zip64 end record is outside the file");
  // Next, the sizes and the offset of an entry are in a zip64 field.
  const std::string contents = "N.";
  std::string entry = zip_of({{"a/data.pkl", contents}});
  const size_t directory = entry.find("PK\x01\x02");
  const std::string extra = little_endian(uint16_t{1}) + little_endian(uint16_t{24}) + little_endian(uint64_t{2}) +
                            little_endian(uint64_t{2}) + little_endian(uint64_t{0});
  entry.replace(directory + 20, 8, std::string(8, '\xff'));
  entry.replace(directory + 42, 4, std::string(4, '\xff'));
  EXPECT_ERROR(open_pt(put("f", entry)), "malformed zip64 field");
  entry.replace(directory + 30, 2, little_endian(static_cast<uint16_t>(extra.size())));
  entry.insert(directory + 46 + 10, extra);
  const size_t end_record = entry.rfind("PK\x05\x06");
  entry.replace(end_record + 12, 4, little_endian(static_cast<uint32_t>(46 + 10 + extra.size())));
  EXPECT_TRUE(open_pt(put("f", entry)).is_none());
}

}  // namespace
}  // namespace voxgrad
