// Tests of the validation splits of the segmentation example: nnU-Net's fold 0, and a slab (a range of neighboring
// slices) of a single case.
#include "examples/segment/split.h"

#include <gtest/gtest.h>

#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace segment {
namespace {
namespace vg = voxgrad;

// The expected folds come from sklearn.model_selection.KFold(min(count, 5), shuffle=True, random_state=12345).
TEST(ValidationFold, MatchesNnUNetsFold0) {
  struct Fold {
    size_t count;
    std::vector<size_t> validation;
  };
  for (const auto& [count, validation] : {Fold{1, {0}},
                                          {2, {1}},
                                          {3, {0}},
                                          {4, {0}},
                                          {5, {0}},
                                          {6, {3, 5}},
                                          {7, {3, 6}},
                                          {10, {0, 7}},
                                          {11, {0, 3, 7}},
                                          {16, {0, 7, 8, 11}},
                                          {17, {0, 10, 11, 12}},
                                          {20, {3, 8, 13, 16}}})
    EXPECT_EQ(validation_fold(count), validation) << count;
  EXPECT_TRUE(validation_fold(0).empty());
}

TEST(FindSlab, TakesUpToAQuarterOfEachClass) {
  vg::Tensor label = vg::zeros({4, 48, 6}, {.dtype = vg::u8});
  label.narrow(1, 4, 20).fill_(1);
  label.narrow(1, 20, 10).fill_(2);  // leaves 16 slices of class 1
  label.narrow(1, 30, 1).fill_(3);
  const auto slab = find_slab(label, {1, 2});
  ASSERT_TRUE(slab.has_value());
  EXPECT_EQ(slab->axis, 1);
  EXPECT_EQ(slab->size, 1);
  EXPECT_EQ(slab->start, 20);  // a slice holds 1/10 of class 2 but only 1/16 of class 1
  EXPECT_EQ(describe(*slab), "slices 20 to 20 along y");
  EXPECT_EQ(find_slab(label, {1})->start, 4);
  EXPECT_FALSE(find_slab(label, {3}).has_value());  // class 3 lies in a single slice
  EXPECT_FALSE(find_slab(label, {4}).has_value());  // class 4 is absent
  const auto with_all = find_slab(label, {1, 2, 3});
  ASSERT_TRUE(with_all.has_value());
  EXPECT_EQ(with_all->start, 20);
}

TEST(FindSlab, IgnoresVoxelsInsideOrOutsideASlab) {
  const vg::Tensor label = vg::ones({3, 4, 5}, {.dtype = vg::u8});
  const Slab slab{.axis = 2, .start = 1, .size = 2};
  const vg::Tensor inside = ignore_inside(label, slab, 9), outside = ignore_outside(label, slab, 9);
  EXPECT_EQ(vg::sum(vg::eq(inside, 9)).item(), 3 * 4 * 2);
  EXPECT_EQ(vg::sum(vg::eq(outside, 9)).item(), 3 * 4 * 3);
  EXPECT_EQ(vg::sum(vg::eq(inside, 9)).item() + vg::sum(vg::eq(inside, outside)).item(), 3 * 4 * 2);
  EXPECT_EQ(vg::sum(label).item(), 60);  // the original label is unchanged
}

}  // namespace
}  // namespace segment
