// A small model with unused parameters, and a loss function for it.
#pragma once

#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace voxgrad {

/// A model of two linear layers. forward() uses `spare` only if with_spare is true, and never uses `never` and
/// `frozen`.
struct Model : nn::Module {
  nn::Linear first{6, 5};
  nn::Linear second{5, 3};
  nn::Linear spare{6, 3};
  nn::Linear never{6, 3};
  nn::Parameter frozen{ones({2})};
  nn::Buffer buffer{zeros({2})};
  VG_MODULE(first, second, spare, never, frozen, buffer)

  Tensor forward(const Tensor& x, bool with_spare = false) {
    const Tensor y = second(tanh(first(x)));
    return with_spare ? y + spare(x) : y;
  }
};

inline constexpr int64_t kBatch = 8;  // samples per step, summed over all ranks

inline Tensor loss_of(Model& model, const Tensor& x, bool with_spare = false) {
  const Tensor y = model(x, with_spare);
  return mean(y * y) + mean(y);
}

}  // namespace voxgrad
