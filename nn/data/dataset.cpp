// Implements the datasets.
#include "nn/data/dataset.h"

namespace voxgrad::data {

TensorDataset::TensorDataset(Tensor inputs, Tensor targets) : inputs_(std::move(inputs)), targets_(std::move(targets)) {
  check(inputs_.defined() && inputs_.dim() > 0, "TensorDataset", "inputs must have at least one axis, got ",
        describe(inputs_));
  check(!targets_.defined() || (targets_.dim() > 0 && targets_.size(0) == inputs_.size(0)), "TensorDataset",
        "the first axes of inputs and targets must have the same size, got ", describe(inputs_), " and ",
        describe(targets_));
}

Sample TensorDataset::get(int64_t index, Generator&) const {
  return {inputs_.select(0, index), targets_.defined() ? targets_.select(0, index) : Tensor()};
}

FunctionDataset::FunctionDataset(int64_t size, Function function) : size_(size), function_(std::move(function)) {
  check(size >= 0, "FunctionDataset", "size must not be negative, got ", size);
  check(static_cast<bool>(function_), "FunctionDataset", "the function is empty");
}

}  // namespace voxgrad::data
