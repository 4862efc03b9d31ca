// How good a super-resolved volume is, and making one of any size.
#pragma once

#include <voxgrad.h>

#include "examples/superres/model.h"

namespace superres {

struct Score {
  double psnr = 0;  ///< dB, over the voxels of the truth above 5 % of its maximum
  double ssim = 0;  ///< over the same voxels
};

/// Peak signal-to-noise ratio and structural similarity (Wang, Bovik, Sheikh, Simoncelli 2004, with a uniform
/// window of 7 voxels a side) of two (1, 1, D, H, W) volumes; the peak is the truth's maximum.
Score score(const voxgrad::Tensor& result, const voxgrad::Tensor& truth);

/// The network's answer for (1, 1, D, H, W), made of overlapping tiles of the size that it was trained on,
/// `margin` voxels of which are left out at inner edges. `batch` tiles run at a time.
voxgrad::Tensor super_resolve(const SuperResolution& model, const voxgrad::Tensor& low, int64_t tile, int64_t margin,
                              int64_t batch);

}  // namespace superres
