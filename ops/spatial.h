// Spatial parallelism: several ranks share a volume. Each rank stores one slab of the volume (consecutive planes along
// D) and the activations of this slab.
#pragma once

#include "../core/communicator.h"
#include "../core/tensor.h"

namespace voxgrad::distributed {

/// While an object of this class exists, operators of this thread treat volumes (N, C, D, H, W) as slabs: rank r of
/// `group` has the r-th of size() equal parts of the planes along D. The code that uses a model is the same as for one
/// rank:
///
///     nn::DataParallel parallel(model, world);
///     const distributed::SpatialParallel spatial(world);
///     const Tensor loss = dice_ce_loss(model(spatial.slab(volume)), spatial.slab(labels));
///     loss.backward();
///
/// - conv3d and conv_transpose3d exchange the planes that they need from other slabs (halos) with the previous and the
///   next rank, while they compute the rest. conv3d must divide the depth of the volume by exactly the stride ("same"
///   padding), and conv_transpose3d must multiply it by exactly the stride. The stride of conv3d must divide the depth
///   of a slab.
/// - group_norm, instance_norm and batch_norm use the statistics of the whole volume.
/// - cross_entropy and nll_loss with class indices, dice_loss and dice_ce_loss return the loss of the whole volume on
///   all ranks, except with Reduction::none. Other losses return the loss of the slab; the mean over the ranks is the
///   loss of the whole volume.
/// - Pooling and interpolation throw Error if a window contains planes of two slabs. Padding along D and grid_sample
///   throw Error.
/// - All other operators that combine elements along D (sums, softmax, flip, cumsum, layer_norm over D) use only the
///   slab. Ranks with equal generators draw equal random numbers (dropout).
///
/// The backward pass computes the gradients of the sum of the losses of all ranks. nn::DataParallel on the same group
/// divides these gradients by size(), which gives the gradients of the loss of the whole volume. All ranks must call
/// the same operators in the same order. The gradients of convolutions and norms of slabs cannot be differentiated
/// again. A backward pass may run after the object is destroyed, but `group` must outlive it. With one rank, the object
/// has no effect.
class [[nodiscard]] SpatialParallel {
 public:
  explicit SpatialParallel(Communicator& group) : group_(group), guard_(group.size() > 1 ? &group : nullptr) {}

  /// Returns this rank's slab of `whole` (..., D, H, W) as a dense tensor. Throws Error unless the size of
  /// the group divides D.
  Tensor slab(const Tensor& whole) const;
  /// Concatenates the slabs (..., D, H, W) of all ranks along D. All ranks get the result. The result is not
  /// differentiable.
  Tensor gather(const Tensor& slab) const;

 private:
  Communicator& group_;
  SpatialGroupGuard guard_;
};

}  // namespace voxgrad::distributed
