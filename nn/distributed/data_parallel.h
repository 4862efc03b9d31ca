// Data-parallel training: every rank has the whole model and processes a part of each batch.
#pragma once

#include <memory>
#include <utility>

#include "../module.h"
#include "communicator.h"

namespace voxgrad::nn {

/// Options of DataParallel.
struct DataParallelOptions {
  /// The dtype in which gradients are sent and added: f32, or bf16, which halves the traffic. Gradients of f64
  /// parameters always use f64.
  DType reduce_dtype = f32;
  double bucket_cap_mb = 25;  ///< maximum size of a bucket of gradients in MiB
};

/// Averages gradients over the ranks, as PyTorch's DistributedDataParallel does (Li et al., "PyTorch Distributed",
/// arXiv:2006.15704):
///
///     nn::DataParallel parallel(model, world);
///     loss.backward();  // the loss of this rank's part of the batch; averages the gradients over the ranks
///     optimizer.step();
///
/// Call the model itself; a DataParallel object has no forward(). During the lifetime of a DataParallel object,
/// backward passes average the gradients of the model's parameters. Gradients are collected in buckets, from the last
/// declared parameter to the first. The reduction of a bucket starts as soon as the bucket is full and overlaps with
/// the rest of the pass. If the losses are means over parts of equal size, the gradients equal those of the whole batch
/// on one rank, up to rounding. Runs with the same number of ranks give the same bits.
///
/// All ranks must run the same backward passes, and each pass must reach at least one parameter. If a pass reaches a
/// parameter on another rank but not on this rank, the gradient of this rank counts as zero. If no rank reaches the
/// parameter, its gradient is not changed. At the start of each pass, the ranks exchange lists of the parameters that
/// they reach. A rank that reaches all parameters does not wait for the lists. If layers communicate in the backward
/// pass, as SyncBatchNorm and SpatialParallel do, all ranks must reach the same parameters.
///
/// Backward passes with create_graph = true are not supported. The gradient of a parameter is stored in a bucket, and
/// the next pass overwrites the gradient; clone() a gradient to keep it. On GPUs, passes can be captured in a CUDA
/// graph. The ranks do not exchange the reached parameters of a captured pass: a parameter counts as reached if this
/// rank reaches it, or if any rank reached it in the last pass before the capture. Buffers are not averaged, so the
/// running statistics of BatchNorm differ between the ranks.
class DataParallel : NonCopyable {
 public:
  /// Copies the parameters and buffers of rank 0 to all ranks. From then on, backward passes average the gradients of
  /// the parameters that require grad at the time of construction. Keeps references to the tensors and to
  /// `communicator`. Throws Error on all ranks if a parameter is neither contiguous nor channels_last, or if the ranks
  /// have different options. Also throws if the parameters or buffers of two ranks differ in name, order, shape, dtype
  /// or requires_grad; the message names the rank and the tensor.
  explicit DataParallel(const Module& module, distributed::Communicator& communicator,
                        const DataParallelOptions& options = {});
  ~DataParallel();

  /// A guard for gradient accumulation. While the guard exists, backward passes accumulate gradients on each rank
  /// without communication. The first pass afterwards averages the accumulated gradients over the ranks:
  ///
  ///     {
  ///       const auto guard = parallel.no_sync();
  ///       loss.backward();
  ///     }
  class [[nodiscard]] NoSync : NonCopyable {
   public:
    ~NoSync() { --*guards_; }

   private:
    friend class DataParallel;
    explicit NoSync(std::shared_ptr<int> guards) : guards_(std::move(guards)) { ++*guards_; }
    std::shared_ptr<int> guards_;  ///< number of existing NoSync objects
  };
  /// Returns a guard that suspends the averaging of gradients.
  NoSync no_sync();

 private:
  class Reducer;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace voxgrad::nn
