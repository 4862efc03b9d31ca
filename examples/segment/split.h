// Functions that split labeled data into a training part and a validation part.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <voxgrad.h>

namespace segment {

/// Returns the indices of the validation cases in nnU-Net's fold 0, in ascending order. The `count` cases must be in
/// alphabetical order. nnU-Net uses scikit-learn's KFold(5, shuffle=True, random_state=12345). With fewer than five
/// cases, this function uses one case per fold.
std::vector<size_t> validation_fold(size_t count);

/// Adjacent slices of a volume.
struct Slab {
  int64_t axis = 0;   ///< 0, 1 or 2: D, H or W
  int64_t start = 0;  ///< first slice
  int64_t size = 0;   ///< number of slices
};

/// Selects the slab of a label map (D, H, W) u8 that is used for validation: adjacent slices along the longest axis,
/// 1/48 of its length. The score of a slab is a sum over the classes in `scored`: the fraction of the class's voxels
/// that lie in the slab, but at most 1/8. Returns the slab with the highest score. Excludes slabs with more than 1/4 of
/// the voxels of a class, so that enough voxels are left for training. Returns nothing if every slab is excluded or has
/// the score 0.
std::optional<Slab> find_slab(const voxgrad::Tensor& label, const std::vector<int64_t>& scored);

/// Describes a slab by the axes of the file: "slices 113 to 121 along y".
std::string describe(const Slab& slab);

/// Returns a copy of a label map. All voxels inside the slab (ignore_inside) or outside it (ignore_outside) are set to
/// ignore_index.
voxgrad::Tensor ignore_inside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);
voxgrad::Tensor ignore_outside(const voxgrad::Tensor& label, const Slab& slab, int64_t ignore_index);

}  // namespace segment
