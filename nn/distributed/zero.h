// An optimizer's state, a part on each rank.
#pragma once

#include "../optim/optimizer.h"
#include "communicator.h"

namespace voxgrad::nn {

/// The first stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
/// arXiv:1910.02054), PyTorch's ZeroRedundancyOptimizer: each rank steps some of the parameters, for which alone it
/// keeps the optimizer's state, and then gives them to all others.
///
///   nn::DataParallel parallel(model, world);
///   optim::AdamW optimizer(model.parameters(), options);
///   nn::ZeroRedundancy sharded(optimizer, world);
///   loss.backward();
///   optimizer.step();  // as before: gradients are those of all ranks, and so are clipping and GradScaler
///
/// Parameters have the bits that they would have without it. A step cannot be captured.
class ZeroRedundancy {
 public:
  /// For an optimizer of the same parameters and options on all ranks, before its first step or load_state_dict().
  /// Keeps references to both. Throws, on all ranks, if the numbers or sizes of parameters differ, and if there is
  /// state.
  ZeroRedundancy(optim::Optimizer& optimizer, distributed::Communicator& communicator);
  /// The optimizer is of no use afterwards: a step throws.
  ~ZeroRedundancy();
  ZeroRedundancy(const ZeroRedundancy&) = delete;
  ZeroRedundancy& operator=(const ZeroRedundancy&) = delete;

  /// On all ranks, before rank `to` calls state_dict() or save_checkpoint(): gives it the state of all, until the next
  /// step. Elsewhere state_dict() throws. What was saved is the state of the optimizer without sharding:
  /// load_state_dict() on any number of ranks keeps of it what belongs to each.
  void consolidate_state_dict(int to = 0);
  /// The rank that steps each parameter.
  const std::vector<int>& owners() const { return owners_; }

 private:
  void exchange();

  optim::Optimizer& optimizer_;
  distributed::Communicator& group_;
  std::vector<int> owners_;
};

}  // namespace voxgrad::nn
