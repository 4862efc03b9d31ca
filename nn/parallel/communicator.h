// What processes that train one model say to each other: a handful of collectives.
#pragma once

#include <memory>
#include <string>

#include "core/tensor.h"

namespace voxgrad::parallel {

/// How the elements of several ranks become one. Halves are added in f32, and rounded at each addition.
enum class ReduceOp { sum, max, min };

/// What several ranks found out together: each of them throws it, with the same message.
class CollectiveError : public Error {
 public:
  CollectiveError(int reporter, const std::string& what) : Error(what), reporter_(reporter) {}
  /// The first of these ranks, which should tell the user.
  int reporter() const { return reporter_; }

 private:
  int reporter_;
};

/// A collective under way. Keeps its tensor.
class Work {
 public:
  virtual ~Work() = default;
  /// Lets it go on, and tells whether it is over.
  virtual bool test() = 0;
  /// Returns once it is over. Throws, as all collectives do, if a rank does not come in time.
  virtual void wait() = 0;
};

/// A group of ranks. Each function is called by all of them, in the same order, with tensors of the same shape and
/// dtype: which is not checked. Tensors are f32, f64, bf16, f16 or i64 (broadcast and all_gather: any dtype), of at
/// most 2^31 - 1 elements; where a function writes to its argument, that must be writable in place. Sums are made in an
/// order that follows from the number of ranks and of elements, so two runs give the same bits, and all ranks have the
/// same.
///
/// A rank that waits longer than the timeout throws CollectiveError, which names the ranks that did not come. After an
/// error the group cannot be used any more. One thread at a time.
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The number among the ranks of this machine, from 0.
  virtual int local_rank() const = 0;
  /// Where this rank's tensors are to lie. NCCL takes those of the CPU, too, by way of the GPU.
  virtual Device device() const = 0;
  /// How long a rank waits for others: 600 seconds if nothing else was set. Throws unless `seconds` is positive.
  virtual void set_timeout(double seconds) = 0;

  /// Starts an all_reduce of a contiguous tensor, which nobody may read or write until it is over.
  virtual std::unique_ptr<Work> all_reduce_async(const Tensor& tensor, ReduceOp op = ReduceOp::sum) = 0;
  /// Replaces each element by the sum, or what `op` says, over the ranks.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Replaces the elements by those of rank `root`.
  virtual void broadcast(const Tensor& tensor, int root = 0) = 0;
  /// (size(), shape of `tensor`...): the tensors of all ranks.
  virtual Tensor all_gather(const Tensor& tensor) = 0;
  /// Of tensors (size(), shape...), the sum over the ranks of row rank().
  virtual Tensor reduce_scatter(const Tensor& tensor, ReduceOp op = ReduceOp::sum) = 0;
  /// Returns once all ranks have come here.
  virtual void barrier() = 0;
  /// Ends the processes of all ranks, with this exit code.
  virtual void abort(int code) = 0;
};

/// Whether this build has NCCL.
bool nccl_available();
/// All processes that torchrun, or whoever sets RANK and the rest (environment.h), mpirun or srun started, each with
/// the GPU of the number of its local rank; the process alone if none did. Throws Error if this build has no NCCL, if
/// there is no such GPU, if the environment makes no sense, if ranks do not come within a minute, and if mpirun is to
/// be understood without MPI in this build.
///
/// Its all_reduce, broadcast, all_gather and reduce_scatter of tensors on the GPU are queued in a stream of their own
/// behind what was queued before, and the host goes on. A rank that is gone, an error within NCCL, and a rank that does
/// not come within the timeout end all processes, after one line on stderr that names the rank. What a CUDAGraph
/// replays is not timed.
Communicator& nccl_world();
/// Leaves the group in order: every rank's last call.
void nccl_finalize();

/// Whether this build has MPI.
bool mpi_available();
/// All processes that mpirun or srun started; the process alone if none did. The first call starts MPI. Throws if this
/// build has no MPI, and if the launcher or the environment (environment.h) tells other numbers than MPI.
Communicator& mpi_world();
/// Ends MPI, if mpi_world() started it: every rank's last call.
void mpi_finalize();

}  // namespace voxgrad::parallel
