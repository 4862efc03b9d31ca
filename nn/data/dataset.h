// Datasets: sources of training samples.
#pragma once

#include <cstdint>
#include <functional>

#include "../../core/random.h"
#include "../../core/tensor.h"

namespace voxgrad::data {

/// A sample, or a batch of samples that are stacked along a new first axis.
struct Sample {
  Tensor input;
  Tensor target{};  ///< may be undefined
};

/// Base class of datasets: a fixed number of samples that are created on request. Several threads of a loader may call
/// get() at the same time.
class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Returns the number of samples.
  virtual int64_t size() const = 0;
  /// Returns sample `index`, which lies in [0, size()). Random numbers must be drawn from `random`, whose seed depends
  /// only on the loader's seed, the epoch and the index. Do not use the default generator.
  virtual Sample get(int64_t index, Generator& random) const = 0;
};

/// A dataset whose samples are the slices of one or two tensors along their first axis. Samples share memory with the
/// tensors.
class TensorDataset : public Dataset {
 public:
  /// Throws Error if `inputs` has no axis, or if the first axes have different sizes.
  explicit TensorDataset(Tensor inputs, Tensor targets = {});
  int64_t size() const override { return inputs_.size(0); }
  Sample get(int64_t index, Generator& random) const override;

 private:
  Tensor inputs_;
  Tensor targets_;
};

/// A dataset whose samples a function creates, for example random patches of a volume.
class FunctionDataset : public Dataset {
 public:
  using Function = std::function<Sample(int64_t index, Generator& random)>;
  /// Throws Error if `size` is negative or `function` is empty. Several threads may call `function` at the same time.
  FunctionDataset(int64_t size, Function function);
  int64_t size() const override { return size_; }
  Sample get(int64_t index, Generator& random) const override { return function_(index, random); }

 private:
  int64_t size_;
  Function function_;
};

}  // namespace voxgrad::data
