// Splits of the labelled data into a part to train on and a part to validate on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace segment {

/// The indices of the cases that nnU-Net validates on in fold 0 of `count` cases in alphabetical order, ascending.
/// nnU-Net shuffles by sklearn's KFold(5, shuffle=True, random_state=12345). Fewer than five cases make as many folds.
std::vector<size_t> validation_fold(size_t count);

/// Adjacent slices of a volume.
struct Slab {
  int64_t axis = 0;  ///< of (D, H, W)
  int64_t start = 0;
  int64_t size = 0;
};

/// Chooses the slices of a label (D, H, W) u8 to validate on: a 48th of the longest axis, at the place with the most of
/// each class of `scored`. More than an eighth of a class counts as an eighth, and more than a quarter is not allowed,
/// so that enough is left to train on. Returns nothing if there are no such slices.
std::optional<Slab> find_slab(const voxgrad::Tensor& label, const std::vector<int64_t>& scored);

/// "slices 113 to 121 along y", in the axes of the file.
std::string describe(const Slab& slab);

/// Copies of a label in which the voxels of the slab, or all others, are ignore_index.
voxgrad::Tensor ignore_inside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);
voxgrad::Tensor ignore_outside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);

}  // namespace segment
