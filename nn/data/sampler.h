// In which order samples are visited.
#pragma once

#include <cstdint>
#include <functional>
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

}  // namespace voxgrad::data
