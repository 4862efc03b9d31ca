// Lion.
#pragma once

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

struct LionOptions {
  double lr = 1e-4;
  std::array<double, 2> betas{0.9, 0.99};
  double weight_decay = 0;  ///< shrinks the parameter itself
  bool maximize = false;

  static constexpr const char* kName = "Lion";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const { return {{"exp_avg", true}}; }
};

/// Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023: steps by the sign of an average.
/// Learning rates are 3 to 10 times smaller than AdamW's, weight decay as much larger.
class Lion : public OptimizerOf<LionOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

}  // namespace voxgrad::optim
