// Tests that compare the program `predict` with labels that nnU-Net computed. nnU-Net trained all models except one,
// which has random weights.
#include <array>
#include <cmath>
#include <map>
#include <span>
#include <vector>

#include "core/io/nifti.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "tests/examples/programs.h"

namespace voxgrad {
namespace {

const fs::path kCases = fs::path(TESTS_DIR) / "examples/nnunet";

/// One folder of tests/examples/nnunet, with the settings that nnU-Net used.
struct ModelCase {
  const char* name;
  const char* options;
  /// Minimum fraction of voxels that must have nnU-Net's label. Random weights need a lower minimum, because the scores
  /// of the labels are nearly equal.
  double equal = 0.9999;
};

constexpr ModelCase kModels[] = {
    {"aniso_ct", "--no-mirroring"},
    {"flipped_sitk", "--no-mirroring"},
    {"ignore_small", ""},
    {"iso_plain", ""},
    {"random_old_plans", "--no-mirroring --no-gaussian", 0.998},
    {"regions", "--no-mirroring"},
    {"residual_encoder", ""},
    {"two_channels_border", "--no-mirroring"},
    {"two_d", ""},
    {"two_folds", "--step 0.75"},
};

void expect_labels(const NiftiImage& found, const NiftiImage& expected, double equal) {
  ASSERT_EQ(found.data.shape(), expected.data.shape());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(found.spacing[i], expected.spacing[i], 1e-4);
    for (size_t j = 0; j < 4; ++j) EXPECT_NEAR(found.affine[i][j], expected.affine[i][j], 1e-4);
  }
  const auto count = static_cast<size_t>(expected.data.numel());
  const std::span a(found.data.data<float>(), count), b(expected.data.data<float>(), count);
  // For each label, two numbers of voxels: [0] voxels with this label in both volumes, [1] voxels with this label in
  // one volume plus voxels with this label in the other volume.
  std::map<float, std::array<double, 2>> voxels;
  double same = 0;
  for (size_t i = 0; i < count; ++i) {
    same += a[i] == b[i];
    voxels[a[i]][0] += a[i] == b[i];
    ++voxels[a[i]][1];
    ++voxels[b[i]][1];
  }
  EXPECT_GE(same / static_cast<double>(count), equal);
  for (const auto& [label, sums] : voxels) EXPECT_GE(2 * sums[0] / sums[1], 0.998) << "Dice of label " << label;
}

class Predict : public Programs {
 protected:
  std::string path(const std::string& name) const { return (kCases / name).string(); }
  /// Copies the model of a case to the temporary folder. Returns the path of the copy.
  fs::path copy_model(const std::string& name) const {
    const fs::path copy = folder_ / "model";
    fs::remove_all(copy);
    fs::copy(kCases / name / "model", copy, fs::copy_options::recursive);
    return copy;
  }
  void replace(const fs::path& file, const std::string& from, const std::string& to) const {
    std::string text = read(file);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::ofstream(file, std::ios::binary) << text.replace(at, from.size(), to);
  }
  /// Expects an error, and that the program writes no file.
  void expect_error(const std::string& arguments, const std::string& fragment) const {
    expect_failure("predict " + arguments + " --device cpu", 1, fragment);
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
};

TEST_F(Predict, ComputesTheLabelsOfNnUNet) {
  for (const char* device : {"cpu", "cuda"}) {
    if (std::string(device) == "cuda" && !cuda::is_available()) continue;
    for (const ModelCase& model : kModels) {
      SCOPED_TRACE(concat(model.name, " on ", device));
      const Result result = run(concat("predict ", path(model.name), "/model ", path(model.name),
                                       "/input out --precision highest --device ", device, ' ', model.options));
      ASSERT_EQ(result.code, 0) << result.output;
      expect_labels(load_nifti(folder_ / "out/case.nii.gz"), load_nifti(kCases / model.name / "expected.nii.gz"),
                    model.equal);
    }
  }
}

TEST_F(Predict, ReproducesTheRoundingOfNnUNet) {
  const Result result = run("predict " + path("iso_plain/model") + ' ' + path("iso_plain/input/case_0000.nii.gz") +
                            " out.nii.gz --half-accumulation --device cpu --probabilities --picture");
  ASSERT_EQ(result.code, 0) << result.output;
  const NiftiImage labels = load_nifti(folder_ / "out.nii.gz");
  expect_labels(labels, load_nifti(kCases / "iso_plain/expected.nii.gz"), 1);
  EXPECT_EQ(load_nifti(folder_ / "out_probabilities.nii.gz").data.size(0), 4);
  EXPECT_EQ(read(folder_ / "out.png").substr(1, 3), "PNG");
}

TEST_F(Predict, RejectsDamagedModels) {
  const std::string input = ' ' + path("iso_plain/input") + " out";
  expect_error(path("iso_plain/model") + input + " --folds 3", "fold 3: ");
  expect_error("nothing" + input, "the model folder 'nothing' does not exist");

  fs::path model = copy_model("iso_plain");
  const fs::path file = model / "fold_0/checkpoint_final.pth";
  fs::copy_file(kCases / "aniso_ct/model/fold_0/checkpoint_final.pth", file, fs::copy_options::overwrite_existing);
  expect_error("model" + input,
               "does not fit the network that plans.json describes: decoder.seg_layers.0.weight has shape [4, 12");
  model = copy_model("iso_plain");
  fs::resize_file(file, 100'000);
  expect_error("model" + input, "checkpoint_final.pth");

  const std::array<std::array<const char*, 3>, 4> changes{{
      {"\"patch_size\": [", "\"patch_size\": [-5,", "patch_size"},
      {"\"n_stages\": 3", "\"n_stages\": 1000000000", "n_stages"},
      {"PlainConvUNet", "SwinUNETR", "SwinUNETR"},
      {"\"configurations\"", "\"settings\"", "configurations"},
  }};
  for (const auto& [from, to, message] : changes) {
    replace(copy_model("iso_plain") / "plans.json", from, to);
    expect_error("model" + input, message);
  }
  fs::resize_file(copy_model("iso_plain") / "plans.json", 500);
  expect_error("model" + input, "plans.json");
}

TEST_F(Predict, RejectsUnusableInputs) {
  const std::string model = path("regions/model") + ' ';
  expect_error(model + path("iso_plain/input/case_0000.nii.gz") + " out",
               "the model needs 2 files, one per channel, got 1");
  expect_error(model + path("iso_plain/input") + " out", "must have 2 files, one per channel of the model, found 1");
  NiftiImage image = load_nifti(kCases / "iso_plain/input/case_0000.nii.gz");
  image.data = full({39, 51, 45}, NAN);
  save_nifti(folder_ / "nan.nii.gz", image);
  expect_error(path("iso_plain/model") + " nan.nii.gz out/nan.nii.gz", "is nan");
  std::ofstream(folder_ / "file") << "not a folder";
  expect_error(path("iso_plain/model") + ' ' + path("iso_plain/input") + " file/out", "file/out");
}

}  // namespace
}  // namespace voxgrad
