// Functions that split labeled data into a training part and a validation part.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace segment {

/// Returns the indices of the validation cases in nnU-Net's fold 0, ascending. The `count` cases must be in
/// alphabetical order. nnU-Net uses scikit-learn's KFold(5, shuffle=True, random_state=12345); with fewer than five
/// cases, each case is a fold.
std::vector<size_t> validation_fold(size_t count);

/// Adjacent slices of a volume.
struct Slab {
  int64_t axis = 0;   ///< 0, 1 or 2: D, H or W
  int64_t start = 0;  ///< first slice
  int64_t size = 0;   ///< number of slices
};

/// Selects the slices of a label (D, H, W) u8 for validation: 1/48 of the longest axis. Maximizes the sum, over the
/// classes in `scored`, of the fraction of the class's voxels inside the slab. A fraction above 1/8 counts as 1/8, and
/// a slab with more than 1/4 of a class is rejected, so that enough voxels are left for training. Returns nothing if
/// every slab is rejected or contains no voxel of these classes.
std::optional<Slab> find_slab(const voxgrad::Tensor& label, const std::vector<int64_t>& scored);

/// Describes a slab by the axes of the file: "slices 113 to 121 along y".
std::string describe(const Slab& slab);

/// Returns a copy of a label in which all voxels inside, or outside, the slab are set to ignore_index.
voxgrad::Tensor ignore_inside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);
voxgrad::Tensor ignore_outside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);

}  // namespace segment
