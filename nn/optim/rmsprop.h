// RMSprop.
#pragma once

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

struct RmspropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;

  static constexpr const char* kName = "RMSprop";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{.name = "square_avg", .used = true, .squares = true},
            {"momentum_buffer", momentum != 0},
            {"grad_avg", centered}};
  }
};

/// Hinton, "Neural networks for machine learning", lecture 6e, 2012; centered: Graves, "Generating sequences with
/// recurrent neural networks", arXiv:1308.0850.
class RMSprop : public OptimizerOf<RmspropOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

}  // namespace voxgrad::optim
