// Samplers: the order in which a loader visits samples.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "../../core/error.h"

namespace voxgrad::data {

/// Base class of samplers. A sampler defines the order of the samples of each epoch. The order must depend only on the
/// number of the epoch, so that a loader can resume at any position.
class Sampler {
 public:
  /// Maps a position in [0, size()) to the index of a sample. Several threads may call the function at the same time.
  using Order = std::function<int64_t(int64_t position)>;

  virtual ~Sampler() = default;
  /// Returns the number of samples per epoch.
  virtual int64_t size() const = 0;
  /// Returns the order of an epoch. The returned function must not refer to the sampler, which may be destroyed
  /// earlier.
  virtual Order order(int64_t epoch) const = 0;
  /// Returns a name that identifies the order and its options: "RandomSampler(seed 3)". A loader only accepts the state
  /// of a loader whose sampler has the same name.
  virtual std::string name() const = 0;
  /// Returns the number of processes that share an epoch in equal parts. Each process has its own loader, and this
  /// sampler visits the part of one process. The state of a loader counts the samples and batches of all processes
  /// together.
  virtual int num_replicas() const { return 1; }
  /// Throws Error if the order requires a different batch size. Loaders call this function with their batch size.
  virtual void check_batch_size(int64_t) const {}
};

/// Visits the samples in the order 0, 1, ..., size - 1.
class SequentialSampler : public Sampler {
 public:
  /// Throws Error if `size` is negative.
  explicit SequentialSampler(int64_t size) : size_(size) {
    check(size >= 0, "SequentialSampler", "size must not be negative, got ", size);
  }
  int64_t size() const override { return size_; }
  Order order(int64_t) const override {
    return [](int64_t position) { return position; };
  }
  std::string name() const override { return "SequentialSampler"; }

 private:
  int64_t size_;
};

/// Visits the samples in a different random order in each epoch. Equal seeds give equal orders. An order takes 8 bytes
/// per sample.
class RandomSampler : public Sampler {
 public:
  /// Throws Error if `size` is negative.
  explicit RandomSampler(int64_t size, uint64_t seed = 0) : size_(size), seed_(seed) {
    check(size >= 0, "RandomSampler", "size must not be negative, got ", size);
  }
  int64_t size() const override { return size_; }
  /// Throws OutOfMemoryError if there is not enough memory for the permutation.
  Order order(int64_t epoch) const override;
  std::string name() const override { return concat("RandomSampler(seed ", seed_, ")"); }

 private:
  int64_t size_;
  uint64_t seed_;
};

/// Options of DistributedSampler.
struct DistributedSamplerOptions {
  int num_replicas = 1;    ///< number of processes: Communicator::size()
  int rank = 0;            ///< rank of this process
  int64_t batch_size = 1;  ///< global batch size: LoaderOptions::batch_size * num_replicas
  bool drop_last = false;  ///< skips a last batch that is not full; otherwise the epoch's first samples fill it
};

/// Divides the order of another sampler among several processes: the process of rank r visits part r of each global
/// batch. For a fixed `batch_size`, the samples of each step therefore do not depend on the number of processes, and a
/// loader's state can be loaded with a different number of processes. PyTorch's DistributedSampler instead interleaves
/// single samples.
class DistributedSampler : public Sampler {
 public:
  /// `sampler` must define the same order on all ranks. Throws Error if `sampler` is null or is itself distributed.
  /// Also throws if rank lies outside [0, num_replicas), if batch_size is not a positive multiple of num_replicas, or
  /// if the number of samples plus batch_size exceeds 2^63 - 1.
  DistributedSampler(std::shared_ptr<const Sampler> sampler, const DistributedSamplerOptions& options);
  int64_t size() const override {
    const int64_t all = sampler_->size(), batch = options_.batch_size;
    return (all / batch + (!options_.drop_last && all % batch != 0)) * local_batch();
  }
  Order order(int64_t epoch) const override;
  std::string name() const override {
    return concat("DistributedSampler(", sampler_->name(), ", batch ", options_.batch_size, ")");
  }
  int num_replicas() const override { return options_.num_replicas; }
  void check_batch_size(int64_t batch_size) const override {
    check(batch_size == local_batch(), "DistributedSampler", "the loader's batch_size must be ", options_.batch_size,
          " / num_replicas = ", local_batch(), ", got ", batch_size);
  }

 private:
  int64_t local_batch() const { return options_.batch_size / options_.num_replicas; }

  std::shared_ptr<const Sampler> sampler_;
  DistributedSamplerOptions options_;
};

}  // namespace voxgrad::data
