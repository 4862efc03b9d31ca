// One volume over several ranks: each has a slab of it, and holds the activations of that alone.
#pragma once

#include "../core/communicator.h"
#include "../core/tensor.h"

namespace voxgrad::distributed {

/// While it lives, volumes (N, C, D, H, W) that operators of this thread take are slabs: rank r of `group` has the r-th
/// of size() equal parts of the planes along D. A model is used as on one rank:
///
///   nn::DataParallel parallel(model, world);
///   const distributed::SpatialParallel spatial(world);
///   const Tensor loss = dice_ce_loss(model(spatial.slab(volume)), spatial.slab(labels));
///   loss.backward();
///
/// - conv3d and conv_transpose3d exchange the planes that they read beyond the slab (halos) with the ranks in front and
///   behind, while they compute what needs none. Their depth must change by the stride alone ("same" padding), and by a
///   stride that divides that of the slab.
/// - group_norm, instance_norm and batch_norm take the statistics of the whole volume.
/// - cross_entropy and nll_loss with class maps, dice_loss and dice_ce_loss are those of the whole volume, on all
///   ranks, but with Reduction::none. Others are those of the slab: their mean over the ranks is the whole volume's.
/// - Pooling and interpolation work where no window reaches from one slab into the next, and throw where one would, as
///   padding along D and grid_sample do.
/// - What else reaches along D (sums, softmax, flip, cumsum, layer_norm over D) sees the slab alone, and ranks with
///   equal generators draw equal numbers (dropout).
///
/// Gradients are those of the sum of all ranks' losses: with nn::DataParallel on the same group, which divides by
/// size(), those of the whole volume in the parameters. All ranks call the same operators in the same order. Gradients
/// of such convolutions and norms cannot be differentiated again. Backward passes may run after it is gone; `group`
/// must live until then. With one rank everything is as without it.
class [[nodiscard]] SpatialParallel {
 public:
  explicit SpatialParallel(Communicator& group) : group_(group), guard_(group.size() > 1 ? &group : nullptr) {}

  /// This rank's part of (..., D, H, W), contiguous. Throws Error unless size() divides D.
  Tensor slab(const Tensor& whole) const;
  /// The whole from all ranks' slabs (..., D, H, W), on all ranks, without gradients.
  Tensor gather(const Tensor& slab) const;

 private:
  Communicator& group_;
  SpatialGroupGuard guard_;
};

}  // namespace voxgrad::distributed
