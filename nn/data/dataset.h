// Datasets: sources of training samples.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

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
  explicit TensorDataset(Tensor inputs, Tensor targets = {})
      : inputs_(std::move(inputs)), targets_(std::move(targets)) {
    check(inputs_.defined() && inputs_.dim() > 0, "TensorDataset", "inputs must have at least one axis, got ",
          describe(inputs_));
    check(!targets_.defined() || (targets_.dim() > 0 && targets_.size(0) == inputs_.size(0)), "TensorDataset",
          "the first axes of inputs and targets must have the same size, got ", describe(inputs_), " and ",
          describe(targets_));
  }
  int64_t size() const override { return inputs_.size(0); }
  Sample get(int64_t index, Generator&) const override {
    return {inputs_.select(0, index), targets_.defined() ? targets_.select(0, index) : Tensor()};
  }

 private:
  Tensor inputs_;
  Tensor targets_;
};

/// A dataset whose samples a function creates, for example random patches of a volume.
class FunctionDataset : public Dataset {
 public:
  using Function = std::function<Sample(int64_t index, Generator& random)>;
  /// Throws Error if `size` is negative or `function` is empty. Several threads may call `function` at the same time.
  FunctionDataset(int64_t size, Function function) : size_(size), function_(std::move(function)) {
    check(size >= 0, "FunctionDataset", "size must not be negative, got ", size);
    check(static_cast<bool>(function_), "FunctionDataset", "the function is empty");
  }
  int64_t size() const override { return size_; }
  Sample get(int64_t index, Generator& random) const override { return function_(index, random); }

 private:
  int64_t size_;
  Function function_;
};

}  // namespace voxgrad::data
