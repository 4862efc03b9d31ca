// Collective communication between the ranks that train one model.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "scoped_value.h"
#include "tensor.h"

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

/// A tensor on its way to, or from, another rank.
struct Message {
  Tensor tensor;
  int peer;
};

/// A collective under way. It completes even if its Work is dropped, and its tensors live until then.
class Work {
 public:
  virtual ~Work() = default;
  /// Makes progress without blocking. Returns true once the collective has completed. Throws as wait() does.
  virtual bool test() = 0;
  /// Returns once the collective has completed. Throws CollectiveError if a rank does not come in time, or if the
  /// ranks' calls differ.
  virtual void wait() = 0;
};

/// Hashes of a rank's call of a collective, by which the ranks find out whether their calls fit together.
struct Signature {
  uint64_t call = 0;  ///< of Collective::describe(): the same on all ranks
  /// The sum, modulo 2^64, of the hashes of all messages (sender, receiver, bytes). A sender adds the hash, a receiver
  /// subtracts it, so the sum over all ranks is 0.
  uint64_t messages = 0;
};

/// A collective as an engine takes it: of tensors on device(), contiguous, with what Communicator's functions promise
/// checked.
struct Collective {
  enum class Kind : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, send_receive };
  Kind kind;
  const char* name;    ///< for messages
  Tensor in{}, out{};  ///< all_reduce, broadcast: the same
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::vector<Message> sends{}, receives{};  ///< instead of in and out; also channels_last
  Shape slab{};                              ///< of send_receive: the volume that the messages are parts of, or empty

  /// All of them.
  Tensors tensors() const;
  /// The arguments that must be the same on all ranks: "all_reduce (max) of [2, 3] f32".
  std::string describe() const;
  /// describe() and the messages of `rank`.
  std::string describe(int rank) const;
  Signature signature(int rank) const;
};

/// Whether the calls of all ranks fit together.
bool calls_agree(std::span<const Signature> of_ranks);
/// "the ranks' calls differ: ranks 0, 2 call all_reduce (sum) of [3] f32; rank 1 calls ...", from the describe(rank) of
/// each rank.
std::string describe_disagreement(const std::vector<std::string>& of_ranks);
/// "rank 1" or "ranks 1, 3".
std::string list_ranks(const std::vector<int>& ranks);

/// A group of ranks. All ranks call the same functions in the same order, with tensors of the same shape and dtype, the
/// same operation and the same root. Tensors are f32, f64, bf16, f16 or i64 (broadcast and all_gather: any dtype), of
/// at most 2^31 - 1 elements; where a function writes to its argument, that must be writable in place. The order of
/// additions follows from the number of ranks and of elements: all ranks have the same bits, and so have two runs.
///
/// If the ranks' calls differ, an error names the ranks and the call of each. MPI's ranks gather their calls (256 bytes
/// each) while the collective runs, and its Work throws CollectiveError instead of completing. NCCL's ranks send their
/// calls to rank 0 from a thread beside the program: within a second all processes end, after one line on stderr. No
/// collective waits for the comparison before it starts.
///
/// A rank that waits longer than the timeout throws CollectiveError, which names the ranks that did not come. After an
/// error the group cannot be used any more. One thread at a time.
class Communicator {
 public:
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The number among the ranks of this machine, from 0.
  int local_rank() const { return local_rank_; }
  /// Where this rank's tensors are to lie. A GPU's group takes those of the CPU, too, by way of the GPU.
  Device device() const { return device_; }
  /// How long a rank waits for others: 600 seconds if nothing else was set. Throws unless `seconds` is positive.
  void set_timeout(double seconds);

  /// Starts an all_reduce of a contiguous tensor, which nobody may read or write until it is over.
  std::unique_ptr<Work> all_reduce_async(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Replaces each element by the sum, or what `op` says, over the ranks.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Replaces the elements by those of rank `root`.
  void broadcast(const Tensor& tensor, int root = 0);
  /// Starts what torch.distributed calls batch_isend_irecv: elements go in the order of memory, and each message that a
  /// rank sends is one that its peer receives in the same call, with as many bytes. Tensors of any dtype on device(),
  /// dense in either memory format; nobody may write to them, or read those that are received, until it is over.
  /// `slab`, if given, is a shape that must be the same on all ranks: of the volume whose parts the messages are.
  std::unique_ptr<Work> send_receive_async(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                           const Shape& slab = {});
  /// (size(), shape of `tensor`...): the tensors of all ranks.
  Tensor all_gather(const Tensor& tensor);
  /// Of tensors (size(), shape...), the sum over the ranks of row rank().
  Tensor reduce_scatter(const Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Returns once all ranks have come here.
  void barrier();
  /// Ends the processes of all ranks, with this exit code.
  virtual void abort(int code) = 0;

  /// The engine, which the functions above call.
  virtual std::unique_ptr<Work> start(const Collective& collective) = 0;

 protected:
  Communicator(int rank, int size, int local_rank, Device device)
      : rank_(rank), size_(size), local_rank_(local_rank), device_(device) {}
  /// Seconds.
  double timeout() const { return timeout_; }

 private:
  const int rank_, size_, local_rank_;
  const Device device_;
  std::atomic<double> timeout_ = 600;
};

/// The ranks that share the volumes of this thread's operators, slab by slab (ops/spatial.h); null if there are none.
Communicator* spatial_group();
/// Sets spatial_group() while it lives; null stands for none. `group` must live as long.
class [[nodiscard]] SpatialGroupGuard {
 public:
  [[nodiscard]] explicit SpatialGroupGuard(Communicator* group);

 private:
  ScopedValue<Communicator*> group_;
};

}  // namespace voxgrad::parallel
