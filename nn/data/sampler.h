// In which order samples are visited.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace voxgrad::data {

/// An order for each epoch. It depends on the epoch's number only, so that any position can be come back to.
class Sampler {
 public:
  /// The sample at each position of [0, size()). Called from several threads at once.
  using Order = std::function<int64_t(int64_t position)>;

  virtual ~Sampler() = default;
  /// How many samples an epoch visits.
  virtual int64_t size() const = 0;
  /// Called once when an epoch begins; the sampler may be gone before the order is.
  virtual Order order(int64_t epoch) const = 0;
  /// Which order this is, with what it depends on ("RandomSampler(seed 3)"): a loader goes on from the state of
  /// another one only if their samplers' names agree.
  virtual std::string name() const = 0;
  /// How many loaders, each in a process of its own, share an epoch in equal parts, of which this order is one. A
  /// loader's state counts samples and batches of all of them together.
  virtual int num_replicas() const { return 1; }
  /// Throws if the order is not made for batches of this size.
  virtual void check_batch_size(int64_t) const {}
};

/// 0, 1, ..., size - 1. Takes no memory, however large `size` is.
class SequentialSampler : public Sampler {
 public:
  /// Throws if `size` is negative.
  explicit SequentialSampler(int64_t size);
  int64_t size() const override { return size_; }
  Order order(int64_t epoch) const override;
  std::string name() const override { return "SequentialSampler"; }

 private:
  int64_t size_;
};

/// Another permutation in every epoch, the same ones for the same seed. An order takes 8 bytes a sample.
class RandomSampler : public Sampler {
 public:
  /// Throws if `size` is negative.
  explicit RandomSampler(int64_t size, uint64_t seed = 0);
  int64_t size() const override { return size_; }
  /// Throws OutOfMemoryError if the permutation does not fit.
  Order order(int64_t epoch) const override;
  std::string name() const override;

 private:
  int64_t size_;
  uint64_t seed_;
};

struct DistributedSamplerOptions {
  int num_replicas = 1;    ///< processes, as Communicator::size()
  int rank = 0;            ///< of this one
  int64_t batch_size = 1;  ///< of all of them together: LoaderOptions::batch_size times num_replicas
  bool drop_last = false;  ///< leave out a last batch that is not full; else it is filled from the epoch's start
};

/// The part of one of several processes in the order of another sampler: of each batch of all of them, its
/// rank-th part. So for one `batch_size` the samples of each step are the same, whatever the number of processes, and a
/// loader's state from one number of processes goes on with the same samples on another.
class DistributedSampler : public Sampler {
 public:
  /// Throws unless 0 <= rank < num_replicas, batch_size is a multiple of num_replicas, and `sampler`, which is the same
  /// on all ranks, is a plain one.
  DistributedSampler(std::shared_ptr<const Sampler> sampler, const DistributedSamplerOptions& options);
  int64_t size() const override;
  Order order(int64_t epoch) const override;
  std::string name() const override;
  int num_replicas() const override { return options_.num_replicas; }
  void check_batch_size(int64_t batch_size) const override;

 private:
  int64_t local_batch() const { return options_.batch_size / options_.num_replicas; }

  std::shared_ptr<const Sampler> sampler_;
  DistributedSamplerOptions options_;
};

}  // namespace voxgrad::data
