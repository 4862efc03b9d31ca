// Data parallel training: every rank has the whole model, and a part of each batch.
#pragma once

#include <memory>
#include <utility>

#include "../module.h"
#include "communicator.h"

namespace voxgrad::nn {

struct DataParallelOptions {
  /// In which gradients travel and are added: f32, or bf16, which halves the bytes. Gradients of f64 always do in f64.
  DType reduce_dtype = f32;
  double bucket_cap_mb = 25;  ///< gradients travel together up to so many MiB
};

/// Distributed data parallel, PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", arXiv:2006.15704):
///
///   nn::DataParallel parallel(model, world);
///   loss.backward();  // of this rank's part of the batch; gradients are then the mean over the ranks
///   optimizer.step();
///
/// The model is used as before. While an object of this class lives, backward passes average the gradients of its
/// parameters: in buckets, from the last declared parameter to the first, each of which travels as soon as it is full,
/// while the pass goes on. With losses that are means over parts of one size the gradients are those of the whole batch
/// on one rank, to rounding; the same number of ranks gives the same bits.
///
/// Every rank runs the same backward passes, each of which leads to a parameter. A parameter that a pass does not reach
/// counts as zero if another rank reached it, and is left alone if none did: it is known when the pass begins, and
/// nothing waits for it. (One that the pass leads to without giving it a gradient counts as zero.) Where layers have
/// the ranks talk in the backward pass, as SyncBatchNorm and SpatialParallel do, all ranks must reach the same
/// parameters. Gradients must not be recorded (create_graph). A parameter's gradient lies in its bucket, where the next
/// pass overwrites it: clone() one to keep it. On GPUs passes can be captured: in replays, parameters that no rank
/// reached in the pass before the capture count as such. Buffers are not averaged: those of BatchNorm go on differing
/// between the ranks.
class DataParallel {
 public:
  /// Copies the parameters and buffers of rank 0 to all ranks. Of the parameters those take part that require grad now.
  /// Keeps references to the tensors and to `communicator`. Throws, on all ranks, if a parameter is neither contiguous
  /// nor channels_last, and if the ranks' parameters or buffers
  /// differ by name, order, shape, dtype or requires_grad, or their options differ; names the rank and the tensor.
  explicit DataParallel(const Module& module, distributed::Communicator& communicator,
                        const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// While it lives, gradients add up on each rank alone; the first pass behind it averages their sum. For gradient
  /// accumulation: `{ const auto guard = parallel.no_sync(); loss.backward(); }`.
  class [[nodiscard]] NoSync {
   public:
    ~NoSync() { --*guards_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DataParallel;
    explicit NoSync(std::shared_ptr<int> guards) : guards_(std::move(guards)) { ++*guards_; }
    std::shared_ptr<int> guards_;  ///< how many guards live
  };
  NoSync no_sync();

 private:
  class Reducer;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace voxgrad::nn
