// Random patches of volumes and their class maps.
#pragma once

#include <functional>
#include <vector>

#include "../../core/io/npy.h"
#include "../../core/tensor.h"
#include "dataset.h"

namespace voxgrad::data {

/// A labelled volume of which parts are read on request, from memory or from a file that is larger than memory.
struct PatchSource {
  /// Returns the voxels start .. start + size, which lie within `shape`. Called from several threads at once.
  using Read = std::function<Tensor(const Dims& start, const Shape& size)>;
  Shape shape;  ///< (D, H, W)
  Read image;   ///< returns (C, size...), f32
  Read label;   ///< returns (size...), u8
};

/// A volume in memory: image (C, D, H, W) f32 and label (D, H, W) u8. Throws Error for other dtypes and shapes.
PatchSource patch_source(const Tensor& image, const Tensor& label);
/// The same from files that save_npy writes. Throws Error for other dtypes and shapes.
PatchSource patch_source(const NpyFile& image, const NpyFile& label);

struct PatchOptions {
  Shape size;                   ///< (D, H, W) of a patch
  int64_t samples = 500;        ///< of an epoch; nnU-Net's: 250 batches of two
  int64_t batch_size = 2;       ///< of the loader, which must not shuffle
  double foreground = 0.33;     ///< the part of a batch's samples, its last, that have foreground at their centre
  int64_t ignore_index = -100;  ///< class of ignored voxels, which are never chosen as centres; negative: none
};

/// nnU-Net's sampling: each sample is a patch of a random case at a random place; of the last ones of a batch (from
/// batch_size * (1 - foreground), rounded, on) a random voxel of a random class, background excepted, that the case has
/// is in the middle, or as near to it as the patch's staying inside allows. If a case has ignored voxels, a random
/// voxel that is not ignored is in the middle of the other patches, so that no patch is without labels. Input (C,
/// size...) f32, target (size...) u8. Where a patch is larger than the case, the case is in its middle, and zeros
/// around it.
class PatchDataset : public Dataset {
 public:
  /// Reads all labels once and keeps up to 10,000 voxels of each class, chosen evenly. Throws for options or sources
  /// that make no sense. The constructor and get() throw if a reader of a source returns a shape or dtype that differs
  /// from PatchSource's contract.
  PatchDataset(std::vector<PatchSource> sources, const PatchOptions& options);
  int64_t size() const override { return options_.samples; }
  Sample get(int64_t index, Generator& random) const override;

 private:
  using Voxels = std::vector<int64_t>;  ///< their indices in row-major order
  /// Some voxels of a source.
  struct Places {
    std::vector<Voxels> classes;  ///< for each class that the source has
    Voxels labelled;              ///< of any class; empty if no voxel is ignored
  };
  static Places find_places(const PatchSource& source, int64_t ignore_index);

  std::vector<PatchSource> sources_;
  PatchOptions options_;
  std::vector<Places> places_;  ///< of each source
};

}  // namespace voxgrad::data
