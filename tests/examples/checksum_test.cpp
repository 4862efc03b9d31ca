// Tests the checksum of a plan. A resumed run of the program `segment` reuses preprocessed cases only if the checksum
// of its plan matches.
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "examples/segment/checksum.h"

namespace segment {
namespace {

TEST(Checksum, DependsOnEachSettingOfThePreprocessing) {
  using Plan = nnunet::ModelPlan;
  const std::function<void(Plan&)> changes[] = {
      [](Plan&) {},
      [](Plan& p) { p.orientation = nnunet::Orientation::closest_to_ras; },
      [](Plan& p) {
        p.transpose_forward = {1, 0, 2};
      },
      [](Plan& p) { p.is_2d = true; },
      [](Plan& p) {
        p.spacing = {1, 1, 2};
      },
      [](Plan& p) { p.resample_image.order = 1; },
      [](Plan& p) { p.resample_image.force_separate_z = false; },
      [](Plan& p) { p.resample_image.force_separate_z = true; },
      [](Plan& p) { p.normalization[0].kind = nnunet::Normalization::ct; },
      [](Plan& p) { p.normalization[0].use_mask = true; },
      [](Plan& p) { p.normalization[0].intensities.mean = 5; },
      [](Plan& p) { p.normalization.emplace_back(); },
  };
  std::set<uint32_t> sums;
  for (const auto& change : changes) {
    Plan plan;
    plan.spacing = {1, 1, 1};
    plan.normalization.resize(1);
    change(plan);
    EXPECT_TRUE(sums.insert(checksum(plan, 0)).second) << sums.size();
  }
}

}  // namespace
}  // namespace segment
