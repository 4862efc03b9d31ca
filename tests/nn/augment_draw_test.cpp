// Tests of augmentation: the distributions of random parameters, seeds and errors.
#include <algorithm>
#include <cmath>

#include "nn/data/augment.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using data::Augmentation;
using data::AugmentParams;
using data::Sample;
using Channel = AugmentParams::Channel;

std::vector<AugmentParams> params_of(size_t samples, size_t channels) {
  AugmentParams params;
  params.channels.resize(channels);
  return std::vector(samples, params);
}

TEST(Augmentation, EqualSeedsDrawEqualParameters) {
  const Augmentation augment;
  Generator a(3), b(3), c(4), other(1);
  const Sample batch{rand({4, 2, 5, 6, 7}, {}, &other), affine(rand({4, 1, 5, 6, 7}, {}, &other), 4, 0).to(u8)};
  const Sample first = augment(batch, a), again = augment(batch, b);
  EXPECT_EQ(first.input.to_vector(), again.input.to_vector());
  EXPECT_EQ(first.target.to_vector(), again.target.to_vector());
  EXPECT_NE(augment(batch, c).input.to_vector(), first.input.to_vector());
  EXPECT_NE(augment(batch, a).input.to_vector(), first.input.to_vector());
}

/// Expects that f(params) differs from `identity` with probability p, and that the values that differ cover the range
/// from `low` to `high`.
template <class F>
void expect_drawn(const std::vector<AugmentParams>& all, const char* name, double p, double low, double high,
                  double identity, const F& f) {
  double drawn = 0, smallest = high, largest = low;
  for (const AugmentParams& params : all) {
    const double value = f(params);
    if (value == identity) continue;
    ++drawn;
    EXPECT_GE(value, low) << name;
    EXPECT_LE(value, high) << name;
    smallest = std::min(smallest, value);
    largest = std::max(largest, value);
  }
  EXPECT_NEAR(drawn / static_cast<double>(all.size()), p, 0.02) << name;
  EXPECT_LT(smallest, low + 0.1 * (high - low)) << name;
  EXPECT_GT(largest, high - 0.1 * (high - low)) << name;
}

TEST(Augmentation, DrawsTheDistributionsOfNnUNet) {
  Generator random(5);
  const std::vector<AugmentParams> all = Augmentation().draw(8000, 2, random);
  const auto channel = [](double Channel::*member) {
    return [member](const AugmentParams& p) { return p.channels[1].*member; };
  };
  for (size_t i = 0; i < 3; ++i) {
    expect_drawn(all, "rotation", 0.2, -30, 30, 0, [=](const AugmentParams& p) { return p.rotation[i]; });
    expect_drawn(all, "scaling", 0.2, 0.7, 1.4, 1, [=](const AugmentParams& p) { return p.scaling[i]; });
    expect_drawn(all, "blur", 0.1, 0.5, 1, 0, [=](const AugmentParams& p) { return p.channels[0].blur[i]; });
    const auto mirrored = std::ranges::count_if(all, [=](const AugmentParams& p) { return p.mirror[i]; });
    EXPECT_NEAR(mirrored, 4000, 160);
  }
  expect_drawn(all, "noise", 0.1, 0, 0.1, 0, [](const AugmentParams& p) { return p.noise; });
  expect_drawn(all, "brightness", 0.15, 0.75, 1.25, 1, channel(&Channel::brightness));
  expect_drawn(all, "contrast", 0.15, 0.75, 1.25, 1, channel(&Channel::contrast));
  expect_drawn(all, "low resolution", 0.125, 0.5, 1, 1, channel(&Channel::low_resolution));
  expect_drawn(all, "gamma_inverted", 0.1, 0.7, 1.5, 1, channel(&Channel::gamma_inverted));
  expect_drawn(all, "gamma", 0.3, 0.7, 1.5, 1, channel(&Channel::gamma));
  double below = 0, drawn = 0;
  for (const AugmentParams& p : all) {
    EXPECT_EQ(p.elastic, 0);
    EXPECT_EQ(p.scaling[0], p.scaling[2]);
    below += p.channels[0].gamma < 1;
    drawn += p.channels[0].gamma != 1;
  }
  EXPECT_NEAR(below / drawn, 0.5, 0.04);

  const Augmentation planes({.rotation = {1, -180, 180},
                             .rotation_axes = {true, false, false},
                             .scaling = {1, 0.7, 1.4},
                             .resampled_axes = {false, true, true},
                             .mirror_axes = {false, true, true}});
  for (const AugmentParams& p : planes.draw(50, 1, random)) {
    EXPECT_NE(p.rotation[0], 0);
    EXPECT_EQ(p.rotation[1], 0);
    EXPECT_EQ(p.scaling[0], 1);
    EXPECT_FALSE(p.mirror[0]);
  }
}

TEST(Augmentation, RejectsInvalidOptionsAndInputs) {
  EXPECT_ERROR(Augmentation({.noise = {1.5, 0, 1}}), "noise: p and channel_p must lie in [0, 1]");
  EXPECT_ERROR(Augmentation({.blur = {0.5, 0, 1, -1}}), "blur: p and channel_p must lie in [0, 1]");
  EXPECT_ERROR(Augmentation({.scaling = {0.5, 1.4, 0.7}}), "scaling must be a range");
  EXPECT_ERROR(Augmentation({.gamma = {0.5, 0, 1}}), "gamma must be a range");
  EXPECT_ERROR(Augmentation({.low_resolution = {0.5, 0, 1}}), "low_resolution must be a range within [0.001, 1]");
  EXPECT_ERROR(Augmentation({.rotation = {0.5, -30, NAN}}), "rotation must be a range");
  EXPECT_ERROR(Augmentation({.elastic_spacing = 0}), "elastic_spacing");
  EXPECT_ERROR(Augmentation({.mirror_p = 2}), "mirror_p");
  const Augmentation augment;
  const Tensor x = ones({2, 1, 7, 10, 12}), t = zeros({2, 1, 7, 10, 12}, {.dtype = i64});
  Generator random;
  EXPECT_ERROR(augment({}, random), "input is undefined");
  EXPECT_ERROR(augment({t}, random), "floating");
  EXPECT_ERROR(augment({x[0]}, random), "(N, C, D, H, W)");
  EXPECT_ERROR(augment({x, t[0]}, random), "the target of");
  EXPECT_ERROR(augment({x, t.to(f32)}, random), "the target must have an integer dtype");
  EXPECT_ERROR(augment.apply({x, t}, params_of(1, 1)), "the number of samples in params must be 2, got 1");
  EXPECT_ERROR(augment.apply({x, t}, params_of(2, 3)), "the number of channels in params must be 1, got 3");
  EXPECT_ERROR(Augmentation({.size = Triple(8, 8, 8)})({x, t}, random), "must lie within the input");
  EXPECT_ERROR(augment.draw(-1, 1, random), "samples and channels must not be negative, got -1 and 1");
}

}  // namespace
}  // namespace voxgrad
