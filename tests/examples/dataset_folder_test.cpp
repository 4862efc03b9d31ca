// Tests of nnU-Net's dataset folders: listing, loading, and errors in dataset.json and in the files.
#include "examples/nnunet/dataset_folder.h"

#include "tests/core/file_support.h"

namespace nnunet {
namespace {

using namespace voxgrad;

class DatasetFolderTest : public FileTest {
 protected:
  static constexpr const char* kJson = R"({"channel_names": {"0": "T1", "1": "T2"}, "file_ending": ".nii",
    "labels": {"background": 0, "tumor": 2, "edema": 1}, "numTraining": 2, "name": "anything else"})";

  /// Creates two training cases and one test case with two channels each.
  void SetUp() override {
    FileTest::SetUp();
    for (const char* folder : {"imagesTr", "labelsTr", "imagesTs"}) std::filesystem::create_directory(path(folder));
    for (const char* name : {"imagesTr/b_0000", "imagesTr/b_0001", "imagesTr/a_1_0000", "imagesTr/a_1_0001",
                             "imagesTs/t_0000", "imagesTs/t_0001"})
      save_volume(name, name[11] == '1' ? 1 : 5);
    for (const char* name : {"labelsTr/a_1", "labelsTr/b"}) save_volume(name, 2);
    put("dataset.json", kJson);
    put("imagesTr/.DS_Store", "?");
  }
  /// Saves a volume in which every voxel has the value `value`.
  void save_volume(const std::string& name, double value) const {
    NiftiImage image;
    image.data = full({2, 2, 2}, value);
    save_nifti(path(name + ".nii"), image);
  }
  void expect_rejected(const std::string& message) const { EXPECT_ERROR(DatasetFolder(path("")), message); }
  /// Writes dataset.json with one replacement.
  void replace_in_json(std::string from, const std::string& to) const {
    std::string text = kJson;
    ASSERT_NE(text.find(from), std::string::npos);
    put("dataset.json", text.replace(text.find(from), from.size(), to));
  }
};

TEST_F(DatasetFolderTest, ListsAndLoadsCases) {
  const DatasetFolder folder(path(""));
  using Names = std::vector<std::string>;
  EXPECT_EQ(folder.training, (Names{"a_1", "b"}));
  EXPECT_EQ(folder.test, Names{"t"});
  EXPECT_EQ(folder.channels, (Names{"T1", "T2"}));
  EXPECT_EQ(folder.classes, (Names{"background", "edema", "tumor"}));
  const Case c = folder.load("b");
  EXPECT_EQ(c.image.shape(), (Shape{2, 2, 2, 2}));
  EXPECT_EQ(c.label.at({1, 1, 1}), 2);
  EXPECT_FALSE(folder.load("t").label.defined());
  EXPECT_ERROR(folder.load("c"), "has no case 'c'");
  save_volume("labelsTr/b", 3);
  EXPECT_ERROR(folder.load("b"),
               "'" + path("labelsTr/b.nii").string() + "': voxel [0, 0, 0] is 3, expected a label from 0 to 2");
}

TEST_F(DatasetFolderTest, IgnoreLabelIsNotAClass) {
  replace_in_json("\"tumor\": 2", "\"ignore\": 2");
  const DatasetFolder folder(path(""));
  EXPECT_EQ(folder.classes, (std::vector<std::string>{"background", "edema"}));
  EXPECT_EQ(folder.ignore_index, 2);
  EXPECT_ERROR(folder.load("b"), "there is nothing but background and ignored voxels");
  NiftiImage label = load_nifti(path("labelsTr/b.nii"));
  label.data.set({1, 0, 1}, 1);
  save_nifti(path("labelsTr/b.nii"), label);
  EXPECT_EQ(sum(folder.load("b").label).item(), 7 * 2 + 1);
  label.data.set({1, 0, 1}, 3);
  save_nifti(path("labelsTr/b.nii"), label);
  EXPECT_ERROR(folder.load("b"), "voxel [1, 0, 1] is 3, expected a label from 0 to 1 or the ignored label 2");
}

TEST_F(DatasetFolderTest, AcceptsAlternativeKeysAndReaders) {
  replace_in_json("\"channel_names\"", "\"modality\"");
  EXPECT_EQ(DatasetFolder(path("")).channels.size(), 2u);
  replace_in_json("\"tumor\": 2", "\"tumor\": [2]");
  EXPECT_EQ(DatasetFolder(path("")).classes.size(), 3u);
  EXPECT_EQ(DatasetFolder(path("")).ignore_index, -100);
  for (const char* reader : {"SimpleITKIO", "NibabelIO", "None"}) {
    replace_in_json("\"name\": \"anything else\"", concat("\"overwrite_image_reader_writer\": \"", reader, '"'));
    EXPECT_EQ(DatasetFolder(path("")).training.size(), 2u);
  }
}

/// The limits keep the time and the memory proportional to the size of the file.
TEST_F(DatasetFolderTest, LimitsTheSizeOfDatasetJson) {
  const std::string file = "nnU-Net: '" + path("dataset.json").string() + "'";
  const auto rejects = [&](const std::string& text, const std::string& message) {
    put("dataset.json", text);
    expect_rejected(file + message);
  };
  const auto repeated = [](int count, auto part) {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i > 0 ? "," : "") + part(i);
    return text;
  };
  rejects(std::string(100'000, '['), " has more than 64 levels");
  rejects(std::string(64, '[') + std::string(64, ']'), " must be an object, is array");
  rejects("{\"" + std::string(257, 'k') + "\": 0}", " has a key of more than 256 bytes");
  rejects("[" + repeated(262'144, [](int) { return std::string("{}"); }) + "]", " has more than 262144 values");
  rejects("[" + repeated(262'143, [](int) { return std::string("{}"); }) + "]", " must be an object, is array");
  const auto member = [](int i) { return concat('"', i, "\": 0"); };
  rejects("{" + repeated(4097, member) + "}", " has an object of more than 4096 keys");
  rejects("{" + repeated(4096, member) + "}", " has no \"labels\"");
  replace_in_json("\".nii\"", "\"" + std::string(1000, 'x') + "\"");
  expect_rejected(": file_ending is \"" + std::string(199, 'x') + "...; supported: .nii.gz, .nii");
}

TEST_F(DatasetFolderTest, RejectsInvalidDatasetJson) {
  const std::string file = "nnU-Net: '" + path("dataset.json").string() + "'";
  // The columns are a part of kJson, its replacement, and the end of the error message.
  const std::array<const char*, 3> cases[] = {
      {"\"numTraining\": 2", "\"numTraining\": 3", ": numTraining is 3, but imagesTr has 2 cases"},
      {"\"numTraining\": 2", "\"numTraining\": \"2\"", ": numTraining must be an integer, is \"2\""},
      {"\"numTraining\": 2", "\"numTraining\": 18446744073709551615", ": numTraining must be an integer"},
      {"\"numTraining\": 2", "\"numTraining\": -1", ": numTraining is -1, but imagesTr has 2 cases"},
      {"\"numTraining\": 2", "\"numTraining\": 2, \"numTraining\": 3", ": the key \"numTraining\" occurs twice"},
      {"\"numTraining\"", "\"number\"", " has no \"numTraining\""},
      {"\"channel_names\"", "\"channels\"", " has no \"modality\""},
      {"{\"0\": \"T1\", \"1\": \"T2\"}", "[]", ": channel_names must be an object, is array"},
      {"{\"0\": \"T1\", \"1\": \"T2\"}", "{}", ": channel_names has 0 channels"},
      {"\"1\": \"T2\"", "\"2\": \"T2\"", ": channel_names has no \"1\""},
      {"\"tumor\": 2", "\"tumor\": 3", ": labels.tumor is 3, but there are only 3 labels"},
      {"\"tumor\": 2", "\"tumor\": 1", ": labels.edema is 1, which is also the number of \"tumor\""},
      {"\"tumor\": 2", "\"tumor\": [1, 2]", ": labels.tumor is a list; regions are not supported"},
      {"\"tumor\": 2", "\"tumor\": []", ": labels.tumor is a list; regions are not supported"},
      {"\"edema\"", "\"ignore\"", ": labels.tumor is 2, but there are only 2 labels"},
      {"\"tumor\": 2", "\"ignore\": 3", ": labels.ignore must be the highest label, 2"},
      {"\"background\": 0, \"tumor\": 2", "\"tumor\": 0, \"background\": 2", ": labels.background must be 0"},
      {"\"tumor\": 2, \"edema\": 1", "\"ignore\": 1", ": labels must have at least 2 labels besides \"ignore\""},
      {"\"name\"", "\"dataset\"", " has the key \"dataset\", which is not supported"},
      {"\"name\"", "\"regions_class_order\"", " has the key \"regions_class_order\", which is not supported"},
      {"\"name\": \"anything else\"", "\"overwrite_image_reader_writer\": \"NibabelIOWithReorient\"",
       ": overwrite_image_reader_writer is \"NibabelIOWithReorient\"; supported: SimpleITKIO, NibabelIO"},
      {"\"tumor\": 2", "\"tumor\": 1.5", ": labels.tumor must be an integer, is 1.5"},
      {"\"tumor\": 2", "\"tumor\": {\"edema\": 2}", ": labels.tumor must be an integer, is object"},
      {"\"tumor\": 2", "\"edema\": 2", ": the key \"edema\" occurs twice"},
      {"\".nii\"", "\".png\"", ": file_ending is \".png\"; supported: .nii.gz, .nii"},
      {"}", "", " is not valid JSON at byte"},
      {"\"tumor\": 2", "\"tumor\": 1E999", " is not valid JSON at byte"},
      {kJson, "[1]", " must be an object, is array"},
  };
  for (const auto& [from, to, message] : cases) {
    replace_in_json(from, to);
    expect_rejected(file + message);
  }
  replace_in_json("\"name\": \"anything else\"",
                  "\"name\": [{\"labels\": [[1], {\"b\": null}]}, true, -1, 1.5], \"a\": {\"b\": []}");
  EXPECT_EQ(DatasetFolder(path("")).classes.size(), 3u);
  replace_in_json("\"tumor\": 2", "\"tumor\": [2]");
  EXPECT_EQ(DatasetFolder(path("")).classes.size(), 3u);
  replace_in_json("\".nii\"", "\".nii.gz\"");
  expect_rejected("does not end with .nii.gz, the file_ending of dataset.json");
  replace_in_json(", \"1\": \"T2\"", "");
  expect_rejected("_0001.nii' must have a name like CASE_0000.nii");
  std::filesystem::remove(path("dataset.json"));
  expect_rejected("dataset.json");
}

TEST_F(DatasetFolderTest, RejectsMissingAndExtraFiles) {
  std::filesystem::remove(path("imagesTr/b_0001.nii"));
  expect_rejected("'" + path("imagesTr/b_0001.nii").string() + "' is missing");
  save_volume("imagesTr/b_0001", 1);
  std::filesystem::remove(path("labelsTr/a_1.nii"));
  expect_rejected("'" + path("labelsTr/a_1.nii").string() + "' is missing");
  save_volume("labelsTr/a_1", 1);
  save_volume("labelsTr/c", 1);
  expect_rejected("'" + path("labelsTr/c.nii").string() + "' has no image in imagesTr");
  std::filesystem::remove(path("labelsTr/c.nii"));
  put("imagesTr/b.nii", "?");
  expect_rejected("'" + path("imagesTr/b.nii").string() + "' must have a name like CASE_0000.nii to CASE_0001.nii");
  std::filesystem::remove(path("imagesTr/b.nii"));
  std::filesystem::remove_all(path("imagesTs"));
  EXPECT_TRUE(DatasetFolder(path("")).test.empty());
  std::filesystem::remove_all(path("imagesTr"));
  expect_rejected("has no image in imagesTr");
  put("imagesTr", "a file");
  expect_rejected("cannot read '" + path("imagesTr").string() + "': Not a directory");
}

}  // namespace
}  // namespace nnunet
