// Where training samples come from.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "../../core/random.h"
#include "../../core/tensor.h"

namespace voxgrad::data {

/// One sample, or a batch of them stacked along a new first axis. `target` may be undefined.
struct Sample {
  Tensor input, target{};
};

/// A fixed number of samples, each made when it is asked for. get() is called from several threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;
  /// Sample `index` of [0, size()). What is random about it is drawn from `random`, which depends on the loader's
  /// seed, the epoch and the index only; the default generator must not be used here.
  virtual Sample get(int64_t index, Generator& random) const = 0;
};

/// Samples along the first axis of one or two tensors.
class TensorDataset : public Dataset {
 public:
  /// Throws if the first axes differ.
  explicit TensorDataset(Tensor inputs, Tensor targets = {});
  int64_t size() const override { return inputs_.size(0); }
  Sample get(int64_t index, Generator& random) const override;

 private:
  Tensor inputs_, targets_;
};

/// Samples from a function: for random patches of a volume, for instance.
class FunctionDataset : public Dataset {
 public:
  using Function = std::function<Sample(int64_t index, Generator& random)>;
  /// Throws if `size` is negative or `function` empty.
  FunctionDataset(int64_t size, Function function);
  int64_t size() const override { return size_; }
  Sample get(int64_t index, Generator& random) const override { return function_(index, random); }

 private:
  int64_t size_;
  Function function_;
};

}  // namespace voxgrad::data
