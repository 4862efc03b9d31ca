// Tests of the short programs of docs/gallery.md and of the pictures that they write.
#include <cstdio>
#include <limits>

#include "core/io/safetensors.h"
#include "examples/common/panels.h"
#include "examples/common/sample_data.h"
#include "tests/examples/programs.h"

namespace voxgrad {
namespace {

/// Returns the number that follows `name` in the output of a program.
double number_after(const std::string& output, const std::string& name) {
  const size_t at = output.find(name);
  double value = 0;
  EXPECT_TRUE(at != std::string::npos && std::sscanf(output.c_str() + at + name.size(), "%lf", &value) == 1) << output;
  return value;
}

TEST_F(Programs, FieldRecoversTheConductivity) {
  const Result result = run("field --device cpu --steps 20 --out results");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_LT(number_after(result.output, "relative error of log k: "), 0.6);  // a uniform block has 1
  EXPECT_EQ(read(folder_ / "results/field.png").substr(1, 3), "PNG");
  EXPECT_EQ(load_safetensors(folder_ / "results/field.safetensors").at("log_k").shape(), (Shape{1, 1, 34, 34, 34}));
}

TEST_F(Programs, ShapesReconstructsRegions) {
  if (!examples::find_sample("aal.nii.gz")) {
    expect_failure("shapes --steps 1", 1, "shapes: aal.nii.gz was not found");
    GTEST_SKIP() << "the package mricron-data is not installed";
  }
  const Result result = run("shapes --device cpu --steps 60 --out results");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_GT(number_after(result.output, "Dice on the right half: "), 0.2);
  EXPECT_NEAR(number_after(result.output, "of the most similar left region: "), 0.686, 0.001);  // before the training
  EXPECT_EQ(read(folder_ / "results/shapes.png").substr(1, 3), "PNG");
  EXPECT_EQ(load_safetensors(folder_ / "results/shapes.safetensors").at("unpack.bias").shape(), (Shape{4096}));
}

TEST_F(Programs, VideoLearnsToDraw) {
  const Result result = run("video --device cpu --steps 150 --out results");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_GT(number_after(result.output, "PSNR "), 11);  // about 9 for black videos
  EXPECT_EQ(read(folder_ / "results/video.png").substr(1, 3), "PNG");
  EXPECT_TRUE(load_safetensors(folder_ / "results/video.safetensors").contains("decoder.conv1.affine.bias"));
}

TEST_F(Programs, ShortProgramsReportErrors) {
  expect_failure("field --steps 0", 2, "--steps");
  expect_failure("field --device cuda:x", 2, "--device");
  std::ofstream(folder_ / "file") << "not a folder";
  expect_failure("field --steps 1 --out file", 1, "field: ");
}

TEST_F(Programs, PanelsNeedOneSlicePerRowAndColumn) {
  examples::Panels panels{{"left", "right"}, {"row"}, {rand({4, 4})}, 20, 30};
  EXPECT_THROW(examples::write_panels(folder_ / "panels.png", panels), Error);
  panels.slices.push_back(full({2, 3}, std::numeric_limits<double>::quiet_NaN()));
  examples::write_panels(folder_ / "panels.png", panels);
  EXPECT_EQ(read(folder_ / "panels.png").substr(1, 3), "PNG");
}

}  // namespace
}  // namespace voxgrad
