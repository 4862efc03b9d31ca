// Quality measures of super-resolved volumes, and inference on volumes of any size.
#pragma once

#include <voxgrad.h>

#include "examples/superres/model.h"

namespace superres {

/// Measures of image quality, computed over the voxels where the truth exceeds 5 % of its maximum.
struct Score {
  double psnr = 0;  ///< peak signal-to-noise ratio in dB
  double ssim = 0;  ///< structural similarity
};

/// Compares two volumes (1, 1, D, H, W). The peak is the maximum of the truth. The structural similarity is that
/// of Wang, Bovik, Sheikh and Simoncelli (2004), with a uniform window of 7 x 7 x 7 voxels.
Score score(const voxgrad::Tensor& result, const voxgrad::Tensor& truth);

/// Doubles the resolution of a volume (1, 1, D, H, W) with the network. Runs the network on overlapping tiles of `tile`
/// voxels per side, `batch` tiles at a time. Discards the results for the outer `margin` voxels of a tile, except at
/// the border of the volume. `tile` should be the patch size that was used for training.
voxgrad::Tensor super_resolve(const SuperResolution& model, const voxgrad::Tensor& low, int64_t tile, int64_t margin,
                              int64_t batch);

}  // namespace superres
