// Adam and AdamW.
#pragma once

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient
  bool amsgrad = false;
  bool maximize = false;

  static constexpr const char* kName = "Adam";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{"exp_avg", true},
            {.name = "exp_avg_sq", .used = true, .squares = true},
            {.name = "max_exp_avg_sq", .used = amsgrad, .squares = true}};
  }
};

struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< shrinks the parameter itself
  bool amsgrad = false;
  bool maximize = false;

  static constexpr const char* kName = "AdamW";
  /// Throws Error for values out of range.
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{"exp_avg", true},
            {.name = "exp_avg_sq", .used = true, .squares = true},
            {.name = "max_exp_avg_sq", .used = amsgrad, .squares = true}};
  }
};

/// Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; amsgrad: Reddi et al., "On the
/// convergence of Adam and beyond", ICLR 2018.
class Adam : public OptimizerOf<AdamOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

/// Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
class AdamW : public OptimizerOf<AdamWOptions> {
 public:
  using OptimizerOf::OptimizerOf;

 protected:
  void update(size_t group, const Update& u) override;
};

}  // namespace voxgrad::optim
