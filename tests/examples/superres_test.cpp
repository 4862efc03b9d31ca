// The parts of the super-resolution example that can be checked by themselves.
#include <gtest/gtest.h>

#include <cmath>

#include "examples/superres/evaluate.h"
#include "examples/superres/volume.h"

namespace superres {
namespace {
namespace vg = voxgrad;

double largest_difference(const vg::Tensor& a, const vg::Tensor& b) { return vg::amax(vg::abs(a - b)).item(); }

TEST(Score, KnowsPerfectAndNoisy) {
  vg::manual_seed(1);
  const vg::Tensor truth = vg::rand({1, 1, 20, 20, 20});
  const Score perfect = score(truth, truth);
  EXPECT_TRUE(std::isinf(perfect.psnr));
  EXPECT_NEAR(perfect.ssim, 1, 1e-6);
  // An error of a tenth of the peak everywhere is 20 dB.
  EXPECT_NEAR(score(truth + 0.1 * vg::amax(truth).item(), truth).psnr, 20, 1e-3);
  const Score noisy = score(truth + vg::randn(truth.shape()) * 0.1, truth);
  EXPECT_NEAR(noisy.psnr, 20, 0.3);
  EXPECT_LT(noisy.ssim, 0.98);
}

TEST(Score, CountsOnlyVoxelsAboveFivePercent) {
  vg::Tensor truth = vg::full({1, 1, 16, 16, 16}, 0.01);
  truth.narrow(2, 8, 8).fill_(1);
  vg::Tensor result = truth.clone();
  result.narrow(2, 0, 8).fill_(0.9);  // wrong in the air only
  EXPECT_TRUE(std::isinf(score(result, truth).psnr));
}

TEST(SuperResolve, TilesJoinWithoutSeams) {
  vg::manual_seed(2);
  const SuperResolution untrained({.channels = 4, .layers = 1});
  const vg::Tensor low = vg::rand({1, 1, 19, 33, 24});
  const vg::Tensor whole = untrained(low);
  EXPECT_LT(largest_difference(super_resolve(untrained, low, 12, 3, 5), whole), 1e-6);
  EXPECT_EQ(super_resolve(untrained, vg::rand({1, 1, 6, 30, 5}), 12, 1, 2).shape(), (vg::Shape{1, 1, 12, 60, 10}));
  EXPECT_THROW(super_resolve(untrained, low, 12, 6, 1), vg::Error);
}

TEST(SuperResolution, KeepsTheMeansOfTheInput) {
  vg::manual_seed(3);
  SuperResolution model({.channels = 8, .layers = 2});
  for (const vg::Tensor& p : model.parameters()) vg::nn::init::normal_(p, 0, 0.5);
  const vg::Tensor low = vg::rand({2, 1, 8, 8, 8});
  EXPECT_LT(largest_difference(low_resolution(model(low)), low), 1e-5);
}

TEST(Phantom, IsAHeadInABox) {
  const Volume phantom = make_phantom(64);
  EXPECT_TRUE(phantom.phantom);
  EXPECT_EQ(phantom.data().shape(), (vg::Shape{64, 64, 64}));
  EXPECT_EQ(vg::amax(phantom.data()).item(), 1);
  EXPECT_EQ(phantom.data().at({0, 0, 0}), 0);
  EXPECT_NEAR(phantom.data().at({32, 32, 32}), 0.2, 1e-6);
  EXPECT_THROW(make_phantom(10), vg::Error);
}

}  // namespace
}  // namespace superres
