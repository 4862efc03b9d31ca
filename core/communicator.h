// What processes that train one model say to each other: a handful of collectives.
#pragma once

#include <atomic>
#include <memory>
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

/// A collective under way. Keeps its tensor.
class Work {
 public:
  virtual ~Work() = default;
  /// Lets it go on, and tells whether it is over.
  virtual bool test() = 0;
  /// Returns once it is over. Throws, as all collectives do, if a rank does not come in time.
  virtual void wait() = 0;
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
  std::vector<Message> sends{}, receives{};  ///< in place of in and out; also channels_last

  /// All of them.
  Tensors tensors() const;
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
  std::unique_ptr<Work> send_receive_async(const std::vector<Message>& sends, const std::vector<Message>& receives);
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
