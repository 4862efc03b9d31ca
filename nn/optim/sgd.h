// Stochastic gradient descent.
#pragma once

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< needs momentum and no dampening
  bool maximize = false;

  static constexpr const char* kName = "SGD";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const { return {{"momentum_buffer", momentum != 0}}; }
};

/// With momentum as in Sutskever et al., "On the importance of initialization and momentum in deep learning",
/// ICML 2013, in PyTorch's form.
class SGD : public OptimizerOf<SgdOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

}  // namespace voxgrad::optim
