// Adagrad.
#pragma once

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;  ///< step n has the rate lr / (1 + (n - 1) * lr_decay)
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;

  static constexpr const char* kName = "Adagrad";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{.name = "sum", .used = true, .squares = true, .initial = initial_accumulator_value}};
  }
};

/// Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
class Adagrad : public OptimizerOf<AdagradOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

}  // namespace voxgrad::optim
