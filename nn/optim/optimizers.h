// SGD, Adam, AdamW, RMSprop, Adagrad and Lion: the options of each, with what OptimizerOf asks of them.
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
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const { return {{"momentum_buffer", momentum != 0}}; }
  void step(const Update& u) const;
};
/// With momentum as in Sutskever et al., "On the importance of initialization and momentum in deep learning",
/// ICML 2013, in PyTorch's form.
using SGD = OptimizerOf<SgdOptions>;

/// `decoupled`: weight decay shrinks the parameter itself; it is added to the gradient otherwise.
template <bool decoupled>
struct AdamOptionsOf {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = decoupled ? 1e-2 : 0;
  bool amsgrad = false;
  bool maximize = false;

  static constexpr const char* kName = decoupled ? "AdamW" : "Adam";
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{"exp_avg", true},
            {.name = "exp_avg_sq", .used = true, .squares = true},
            {.name = "max_exp_avg_sq", .used = amsgrad, .squares = true}};
  }
  void step(const Update& u) const;
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;
/// Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; amsgrad: Reddi et al., "On the
/// convergence of Adam and beyond", ICLR 2018.
using Adam = OptimizerOf<AdamOptions>;
/// Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
using AdamW = OptimizerOf<AdamWOptions>;

struct RmspropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;

  static constexpr const char* kName = "RMSprop";
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{.name = "square_avg", .used = true, .squares = true},
            {"momentum_buffer", momentum != 0},
            {"grad_avg", centered}};
  }
  void step(const Update& u) const;
};
/// Hinton, "Neural networks for machine learning", lecture 6e, 2012; centered: Graves, "Generating sequences with
/// recurrent neural networks", arXiv:1308.0850.
using RMSprop = OptimizerOf<RmspropOptions>;

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;  ///< step n has the rate lr / (1 + (n - 1) * lr_decay)
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;

  static constexpr const char* kName = "Adagrad";
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const {
    return {{.name = "sum", .used = true, .squares = true, .initial = initial_accumulator_value}};
  }
  void step(const Update& u) const;
};
/// Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
using Adagrad = OptimizerOf<AdagradOptions>;

struct LionOptions {
  double lr = 1e-4;
  std::array<double, 2> betas{0.9, 0.99};
  double weight_decay = 0;  ///< shrinks the parameter itself
  bool maximize = false;

  static constexpr const char* kName = "Lion";
  void validate() const;
  nn::Fields fields();
  BufferSpecs buffers() const { return {{"exp_avg", true}}; }
  void step(const Update& u) const;
};
/// Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023: steps by the sign of an average.
/// Learning rates are 3 to 10 times smaller than AdamW's, weight decay as much larger.
using Lion = OptimizerOf<LionOptions>;

}  // namespace voxgrad::optim
