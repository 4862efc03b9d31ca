#include "nn/sequential.h"

namespace voxgrad::nn {

Module& Sequential::operator[](size_t index) const {
  check(index < size(), "Sequential", "there is no module ", index, " among ", size());
  return *steps_[index].module;
}

Tensor Sequential::forward(const Tensor& x) const {
  Tensor result = x;
  for (const Step& step : steps_) result = step.forward(*step.module, result);
  return result;
}

Members Sequential::members() {
  Members list;
  for (const Step& step : steps_) list.push_back({std::to_string(list.size()), {}, false, step.module.get()});
  return list;
}

}  // namespace voxgrad::nn
