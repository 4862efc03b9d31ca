// In which order samples are visited.
#pragma once

#include <cstdint>
#include <vector>

namespace voxgrad::data {

/// An order for each epoch. It depends on the epoch's number only, so that any position can be come back to.
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// How many samples an epoch visits.
  virtual int64_t size() const = 0;
  virtual std::vector<int64_t> order(int64_t epoch) const = 0;
};

/// 0, 1, ..., size - 1.
class SequentialSampler : public Sampler {
 public:
  /// Throws if `size` is negative.
  explicit SequentialSampler(int64_t size);
  int64_t size() const override { return size_; }
  std::vector<int64_t> order(int64_t epoch) const override;

 private:
  int64_t size_;
};

/// Another permutation in every epoch, the same ones for the same seed.
class RandomSampler : public Sampler {
 public:
  /// Throws if `size` is negative.
  explicit RandomSampler(int64_t size, uint64_t seed = 0);
  int64_t size() const override { return size_; }
  std::vector<int64_t> order(int64_t epoch) const override;

 private:
  int64_t size_;
  uint64_t seed_;
};

}  // namespace voxgrad::data
