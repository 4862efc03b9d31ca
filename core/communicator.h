// Collective communication between the ranks that train one model.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reduce_op.h"
#include "scoped_value.h"
#include "tensor.h"

namespace voxgrad::distributed {

/// An error that several ranks detect together. Each of these ranks throws the error with the same message.
class CollectiveError : public Error {
 public:
  CollectiveError(int reporter, const std::string& what) : Error(what), reporter_(reporter) {}
  /// Returns the lowest of the ranks that throw the error. This rank should print the message.
  int reporter() const { return reporter_; }

 private:
  int reporter_;
};

/// A tensor that is sent to another rank or received from it.
struct Message {
  Tensor tensor;
  int peer;
};

/// A running collective. Destroying the Work does not cancel the collective. The tensors stay alive until the
/// collective has completed.
class Work : NonCopyable {
 public:
  virtual ~Work() = default;
  /// Makes progress without blocking. Returns true once the collective has completed. Under NCCL, which makes progress
  /// without calls, test() does nothing and returns false even after completion; call wait() instead. Throws as wait()
  /// does.
  virtual bool test() = 0;
  /// Returns once the collective has completed; under NCCL, makes the current stream wait for the collective instead.
  /// Under MPI, throws CollectiveError if a rank does not join before the timeout, or if the ranks' calls differ.
  virtual void wait() = 0;
};

/// Hashes of one rank's call to a collective. Comparing them shows whether the calls of all ranks match.
struct Signature {
  uint64_t call = 0;  ///< hash of the arguments that must be the same on all ranks
  /// The sum, modulo 2^64, of the hashes of all messages (sender, receiver, bytes). A sender adds the hash, a receiver
  /// subtracts it, so the sum over all ranks is 0 if each message is both sent and received.
  uint64_t messages = 0;
};

/// One rank's call to a collective.
struct Call {
  Signature signature{};
  std::string description{};  ///< such as "all_reduce (max) of [2, 3] f32"; lists the messages of send_receive
};

/// The arguments of a collective, which Communicator's functions have checked: contiguous tensors on device().
struct Collective {
  enum class Kind : uint8_t { all_reduce, broadcast, all_gather, send_receive };
  Kind kind;
  const char* name;  ///< name of the function, for error messages
  Tensor in{};       ///< the tensor that is read; undefined for send_receive
  Tensor out{};      ///< the tensor that is written: `in` itself for all_reduce and broadcast
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::vector<Message> sends{};     ///< for send_receive only; the tensors may also be channels_last
  std::vector<Message> receives{};  ///< for send_receive only; the tensors may also be channels_last
  /// For send_receive only: the shape of this rank's part (slab) of a volume that is divided among the ranks, or empty.
  /// Only call() reads `slab`: the ranks' calls match only if their slabs have the same shape.
  Shape slab{};

  /// Returns all tensors of the collective.
  Tensors tensors() const;
  /// Returns the call that `rank` makes.
  Call call(int rank) const;
};

/// Returns "the ranks' calls differ: ranks 0, 2 call all_reduce (sum) of [3] f32; rank 1 calls ...", given the call of
/// each rank. Returns an empty string if the calls of all ranks match.
std::string describe_disagreement(const std::vector<Call>& of_ranks);
/// Returns "rank 1" or "ranks 1, 3".
std::string list_ranks(const std::vector<int>& ranks);

/// A group of ranks. All ranks must call the same functions in the same order, with tensors of the same shape and
/// dtype, the same operation and the same root. Tensors have at most 2^31 - 1 elements and are f32, f64, bf16, f16 or
/// i64 (broadcast and all_gather: any dtype). A function that writes to its argument throws if check_in_place() does
/// not allow the write. The order of additions depends only on the number of ranks and of elements, so all ranks and
/// all runs obtain the same bits.
///
/// If the ranks' calls differ, an error names the ranks and the call of each rank. Collectives start before the calls
/// are compared.
///
/// Under MPI, the ranks exchange their calls (256 bytes each) while the collective runs. If the calls differ, the Work
/// throws CollectiveError instead of completing. A completed Work therefore implies that all ranks made the call. (MPI
/// itself may complete broadcast and send_receive on one rank before another rank makes the call.) Under NCCL, a
/// background thread sends the calls of each rank to rank 0. If the calls differ, all processes end within a second,
/// after one line on stderr.
///
/// If a collective takes longer than the timeout, an error names the missing ranks: under MPI, the waiting ranks throw
/// CollectiveError; under NCCL, all processes end after one line on stderr. After an error, the group can no longer be
/// used. Only one thread may use a group at a time.
class Communicator : NonCopyable {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the index of this rank among the ranks on the same machine, from 0.
  int local_rank() const { return local_rank_; }
  /// The device of this rank's tensors. A group of GPUs also accepts CPU tensors and copies them to the GPU and back.
  Device device() const { return device_; }
  /// Sets how long a rank waits for the other ranks; the default is 600 seconds. Throws unless `seconds` is positive.
  void set_timeout(double seconds);

  /// Starts an all_reduce of a contiguous tensor, which must not be read or written until it has completed.
  std::unique_ptr<Work> all_reduce_async(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Replaces each element by its sum, maximum or minimum over the ranks. Sums of bf16 and f16 are computed in f32 and
  /// rounded after each addition. Throws if `op` is mean.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Replaces the elements by those of rank `root`.
  void broadcast(const Tensor& tensor, int root = 0);
  /// Starts sends and receives, as torch.distributed.batch_isend_irecv does. Elements are sent in memory order. For
  /// each message that a rank sends, the peer must list a message with the same number of bytes among the `receives` of
  /// its matching call. Tensors must be on device() and dense in either memory format; all dtypes are allowed. Until
  /// the Work has completed, sent tensors must not be written, and received tensors must not be read or written. If the
  /// messages are planes of a volume that is divided among the ranks, `slab` can be the shape of this rank's part. A
  /// difference between the shapes is then reported as a difference between the ranks' calls.
  std::unique_ptr<Work> send_receive_async(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                           const Shape& slab = {});
  /// Returns the tensors of all ranks, stacked: (size(), shape of `tensor`...).
  Tensor all_gather(const Tensor& tensor);
  /// Returns once all ranks have called barrier().
  void barrier();
  /// Ends the processes of all ranks, with this exit code.
  virtual void abort(int code) = 0;

  /// Starts a collective whose arguments have been checked. Called by the functions above.
  virtual std::unique_ptr<Work> start(const Collective& collective) = 0;

 protected:
  Communicator(int rank, int size, int local_rank, Device device)
      : rank_(rank), size_(size), local_rank_(local_rank), device_(device) {}
  /// Returns the timeout in seconds.
  double timeout() const { return timeout_; }

 private:
  const int rank_, size_, local_rank_;
  const Device device_;
  std::atomic<double> timeout_ = 600;
};

/// Returns the group of ranks over which this thread's operators divide volumes (ops/spatial.h), or null.
Communicator* spatial_group();
/// Sets spatial_group() during its lifetime. `group` must outlive the guard and may be null.
class [[nodiscard]] SpatialGroupGuard : ScopedValue<Communicator*> {
 public:
  [[nodiscard]] explicit SpatialGroupGuard(Communicator* group);
};

}  // namespace voxgrad::distributed
