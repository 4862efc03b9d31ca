// Unit tests of the super-resolution example and of examples/common.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include "examples/common/canvas.h"
#include "examples/common/progress.h"
#include "examples/common/ranks.h"
#include "examples/superres/evaluate.h"
#include "examples/superres/pictures.h"
#include "examples/superres/volume.h"

namespace superres {
namespace {
namespace vg = voxgrad;

double largest_difference(const vg::Tensor& a, const vg::Tensor& b) { return vg::amax(vg::abs(a - b)).item(); }

TEST(Score, ScoresPerfectAndNoisyResults) {
  vg::manual_seed(1);
  const vg::Tensor truth = vg::rand({1, 1, 20, 20, 20});
  const Score perfect = score(truth, truth);
  EXPECT_TRUE(std::isinf(perfect.psnr));
  EXPECT_NEAR(perfect.ssim, 1, 1e-6);
  // A constant error of a tenth of the peak gives 20 dB.
  EXPECT_NEAR(score(truth + 0.1 * vg::amax(truth).item(), truth).psnr, 20, 1e-3);
  const Score noisy = score(truth + vg::randn(truth.shape()) * 0.1, truth);
  EXPECT_NEAR(noisy.psnr, 20, 0.3);
  EXPECT_LT(noisy.ssim, 0.98);
}

TEST(Score, CountsOnlyVoxelsAboveFivePercent) {
  vg::Tensor truth = vg::full({1, 1, 16, 16, 16}, 0.01);
  truth.narrow(2, 8, 8).fill_(1);
  vg::Tensor result = truth.clone();
  result.narrow(2, 0, 8).fill_(0.9);  // wrong only where the truth is below 5 % of its maximum
  EXPECT_TRUE(std::isinf(score(result, truth).psnr));
}

TEST(SuperResolve, TilesMatchTheWholeVolume) {
  vg::manual_seed(2);
  const SuperResolution untrained({.channels = 4, .layers = 1});
  const vg::Tensor low = vg::rand({1, 1, 19, 33, 24});
  const vg::Tensor whole = untrained(low);
  EXPECT_LT(largest_difference(super_resolve(untrained, low, 12, 3, 5), whole), 1e-6);
  EXPECT_EQ(super_resolve(untrained, vg::rand({1, 1, 6, 30, 5}), 12, 1, 2).shape(), (vg::Shape{1, 1, 12, 60, 10}));
  EXPECT_THROW(super_resolve(untrained, low, 12, 6, 1), vg::Error);
}

TEST(SuperResolution, OutputDownsamplesToTheInput) {
  vg::manual_seed(3);
  SuperResolution model({.channels = 8, .layers = 2});
  for (const vg::Tensor& p : model.parameters()) vg::nn::init::normal_(p, 0, 0.5);
  const vg::Tensor low = vg::rand({2, 1, 8, 8, 8});
  EXPECT_LT(largest_difference(low_resolution(model(low)), low), 1e-5);
}

// Reorients images with all 48 permutations and flips of the axes. Each voxel must keep its world position, and the
// axes of the result must point to the right, to the front and up.
TEST(Upright, KeepsTheWorldPositionOfEachVoxel) {
  std::array<size_t, 3> order{0, 1, 2};
  do {
    for (int signs = 0; signs < 8; ++signs) {
      vg::NiftiImage image;
      image.data = vg::arange(0, 60).reshape({3, 4, 5});
      image.spacing = {3, 2, 1};
      for (auto& row : image.affine) row = {0, 0, 0, 7};
      for (size_t axis = 0; axis < 3; ++axis)
        image.affine[order[axis]][axis] = (signs >> axis & 1 ? -1 : 1) * static_cast<double>(axis + 1);
      const vg::NiftiImage turned = upright(image);
      for (size_t world = 0; world < 3; ++world) EXPECT_EQ(turned.affine[world][world], turned.spacing[2 - world]);
      for (int64_t k = 0; k < 3; ++k)
        for (int64_t j = 0; j < 4; ++j)
          for (int64_t i = 0; i < 5; ++i) {
            std::array<int64_t, 3> at{};
            for (size_t world = 0; world < 3; ++world) {
              const auto& row = image.affine[world];
              const double place = row[0] * double(i) + row[1] * double(j) + row[2] * double(k) + row[3];
              at[world] = std::lround((place - turned.affine[world][3]) / turned.affine[world][world]);
            }
            ASSERT_EQ(turned.data.at({at[2], at[1], at[0]}), image.data.at({k, j, i}));
          }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Upright, UsesTheNearestAxesAndAcceptsAnEmptyAffine) {
  vg::NiftiImage image;
  image.data = vg::arange(0, 24).reshape({2, 3, 4});
  image.affine = {{{0, .3, .95, 0}, {-.9, .1, 0, 0}, {.1, .95, -.3, 0}, {0, 0, 0, 1}}};
  EXPECT_EQ(upright(image).data.shape(), (vg::Shape{3, 4, 2}));
  image.affine = {};
  EXPECT_EQ(upright(image).data.shape(), image.data.shape());
}

TEST(Progress, BarHasTheSameWidthAtEveryStep) {
  EXPECT_EQ(examples::bar_text(1, 2, 4), "##..");
  EXPECT_EQ(examples::bar_text(0, 2, 4), "....");
  for (const auto& [done, total] : {std::pair{2, 2}, {2000, 1000}, {0, 0}, {3, 0}})
    EXPECT_EQ(examples::bar_text(done, total, 4), "####");
  EXPECT_EQ(examples::bar_text(-1, 0, 4), "####");
  EXPECT_EQ(examples::bar_text(-1, 5, 4), "....");
}

TEST(Pictures, DrawsLossCurvesOfAnyRange) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "voxgrad-losses.png";
  for (const auto& losses : std::vector<std::vector<LossLine>>{{{1, 0.5, 0}},
                                                               {{1, 0, 0}, {2, 0, 0}},
                                                               {{7, 1e-9, 0}, {8, 1e9, 0}},
                                                               std::vector<LossLine>(1001, {3, 0.1, 0})}) {
    std::filesystem::remove(path);
    write_loss_curve(path, losses);
    EXPECT_GT(std::filesystem::file_size(path), 1000u);
  }
  std::filesystem::remove(path);
}

TEST(Canvas, RejectsPixelsAndSizesThatDoNotFit) {
  examples::Canvas canvas(4, 3, 0);
  const std::vector<uint8_t> pixels(12);
  canvas.pixels(0, 0, 4, 3, pixels);
  EXPECT_THROW(canvas.pixels(1, 0, 4, 3, pixels), vg::Error);
  EXPECT_THROW(canvas.pixels(0, 0, 4, 2, pixels), vg::Error);
  EXPECT_THROW(examples::Canvas(0, 3, 0), vg::Error);
  EXPECT_THROW(examples::Canvas(40000, 3, 0), vg::Error);
  EXPECT_THROW(canvas.save("/no such folder/picture.png"), vg::Error);
}

TEST(Phantom, HasTheExpectedShapeAndIntensities) {
  const Volume phantom = make_phantom(64);
  EXPECT_TRUE(phantom.phantom);
  EXPECT_EQ(phantom.data().shape(), (vg::Shape{64, 64, 64}));
  EXPECT_EQ(vg::amax(phantom.data()).item(), 1);
  EXPECT_EQ(phantom.data().at({0, 0, 0}), 0);
  EXPECT_NEAR(phantom.data().at({32, 32, 32}), 0.2, 1e-6);
  EXPECT_THROW(make_phantom(10), vg::Error);
}

TEST(StepReports, ArriveInOrderAndOneStepLaterOnAGpu) {
  for (const vg::Device device : {vg::Device::cpu(), vg::Device::cuda()}) {
    if (device.is_cuda() && !vg::cuda::is_available()) continue;
    examples::StepReports reports(device, nullptr);
    const vg::Tensor loss =
        vg::full({}, 1, {.device = device});  // each step overwrites this tensor, like a graph replay
    std::vector<double> losses;
    std::vector<size_t> counts;
    for (int step = 1; step <= 5; ++step) {
      loss.fill_(step);
      const auto due = reports.add(loss, step == 3, /*wait=*/step == 4);
      counts.push_back(due.size());
      for (const auto& report : due) {
        losses.push_back(report.loss);
        EXPECT_EQ(report.interrupted, losses.size() == 3);
      }
    }
    for (const auto& report : reports.finish()) losses.push_back(report.loss);
    EXPECT_EQ(losses, (std::vector<double>{1, 2, 3, 4, 5}));
    EXPECT_EQ(counts, device.is_cuda() ? (std::vector<size_t>{0, 1, 1, 2, 0}) : std::vector<size_t>(5, 1));
  }
}

}  // namespace
}  // namespace superres
