// A dataset of random patches of labeled volumes.
#pragma once

#include <functional>
#include <vector>

#include "../../core/io/npy.h"
#include "../../core/tensor.h"
#include "dataset.h"

namespace voxgrad::data {

/// A labeled volume whose parts are read on request, for example from a file that is larger than memory.
struct PatchSource {
  /// Returns the voxels from start (D, H, W) to start + size, which lie within `shape`. Several threads may call the
  /// function at the same time.
  using Read = std::function<Tensor(const Dims& start, const Shape& size)>;
  Shape shape;  ///< (D, H, W)
  Read image;   ///< returns the image as f32 (C, size[0], size[1], size[2])
  Read label;   ///< returns the labels as u8 of shape `size`
};

/// Creates a source from a volume in memory: image (C, D, H, W) f32 and label (D, H, W) u8. Throws Error for other
/// dtypes and shapes.
PatchSource patch_source(const Tensor& image, const Tensor& label);
/// Creates a source from .npy files with the same dtypes and shapes.
PatchSource patch_source(const NpyFile& image, const NpyFile& label);

/// Options of PatchDataset.
struct PatchOptions {
  Shape size;                   ///< (D, H, W) of a patch
  int64_t samples = 500;        ///< samples per epoch; nnU-Net uses 250 batches of two
  int64_t batch_size = 2;       ///< batch size of the loader, which must not shuffle
  double foreground = 0.33;     ///< fraction of the samples of a batch that are centered on foreground, in [0, 1]
  int64_t ignore_index = -100;  ///< class of ignored voxels, which are never chosen as centers; negative: none
};

/// Random patches, sampled as in nnU-Net. Each sample is a patch of a random source: input (C, D, H, W) f32 and target
/// (D, H, W) u8, where (D, H, W) is PatchOptions::size.
///
/// Sample i of a batch is a foreground sample if i is at least round(batch_size * (1 - foreground)). The center of a
/// foreground sample is a random voxel of a random class of the source, except class 0. The other patches lie at a
/// random position. If the source has ignored voxels, the center of these patches is instead a random voxel that is not
/// ignored, so that each patch contains labels. Patches are shifted to lie inside the source. A source that is smaller
/// than the patch is centered and padded with zeros.
class PatchDataset : public Dataset {
 public:
  /// Reads all labels once and keeps a random selection of up to 10,000 voxels of each class. Throws Error for invalid
  /// options or sources. The constructor and get() throw Error if the shape or dtype that a source returns is not the
  /// one that PatchSource specifies.
  PatchDataset(std::vector<PatchSource> sources, const PatchOptions& options);
  int64_t size() const override { return options_.samples; }
  Sample get(int64_t index, Generator& random) const override;

 private:
  using Voxels = std::vector<int64_t>;  ///< row-major indices of voxels
  /// Voxels of a source that may be centers of patches.
  struct Centers {
    std::vector<Voxels> classes;  ///< voxels of each foreground class of the source
    Voxels labeled;               ///< voxels of all classes except ignore_index; empty if no voxel is ignored
  };
  static Centers find_centers(const PatchSource& source, int64_t ignore_index);

  std::vector<PatchSource> sources_;
  PatchOptions options_;
  std::vector<Centers> centers_;  ///< one entry per source
};

}  // namespace voxgrad::data
