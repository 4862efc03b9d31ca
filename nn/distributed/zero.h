// Sharding of an optimizer's state over the ranks.
#pragma once

#include "../optim/optimizer.h"
#include "communicator.h"

namespace voxgrad::nn {

/// Shards the state of an optimizer over the ranks, as stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations
/// Toward Training Trillion Parameter Models", arXiv:1910.02054) and PyTorch's ZeroRedundancyOptimizer do. Each
/// parameter is owned by one rank. A rank stores only the state of the parameters that it owns. In each step, the rank
/// updates these parameters and sends the new values to the other ranks.
///
///     nn::DataParallel parallel(model, world);
///     optim::AdamW optimizer(model.parameters(), options);
///     nn::ZeroRedundancy sharded(optimizer, world);
///     loss.backward();
///     optimizer.step();  // every rank has all gradients, so clipping and GradScaler work as without sharding
///
/// The parameters have the same bits as without sharding. A step cannot be captured in a CUDA graph.
class ZeroRedundancy : NonCopyable {
 public:
  /// Shards the optimizer, which must have the same parameters and options on all ranks. Keeps references to both
  /// arguments. Throws Error on all ranks if the numbers or sizes of the parameters differ between the ranks, or if the
  /// optimizer already has state: create this object before the first step and before load_state_dict().
  ZeroRedundancy(optim::Optimizer& optimizer, distributed::Communicator& communicator);
  /// After the destruction, steps of the optimizer throw Error.
  ~ZeroRedundancy();

  /// Gathers the whole state on rank `to`, where it is available until the next step. Call it on all ranks before rank
  /// `to` calls state_dict() or save_checkpoint(); state_dict() throws on the other ranks. The saved state is that of
  /// the optimizer without sharding. load_state_dict() works with any number of ranks; each rank keeps the state of its
  /// own parameters.
  void consolidate_state_dict(int to = 0);
  /// Returns the rank that updates each parameter.
  const std::vector<int>& owners() const { return owners_; }

 private:
  /// Broadcasts the updated parameters of each rank.
  void exchange();

  optim::Optimizer& optimizer_;
  distributed::Communicator& group_;
  std::vector<int> owners_;
};

}  // namespace voxgrad::nn
