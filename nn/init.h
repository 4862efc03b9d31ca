// Initial values of parameters. Each function fills a tensor in place, without recording a graph, and returns the
// tensor. `fan` and `gain` are defined as in PyTorch. A null generator selects the default generator.
#pragma once

#include "../core/random.h"
#include "../core/scoped_value.h"
#include "../core/tensor.h"

namespace voxgrad::nn::init {

/// Selects the fan that scales the initial values: the number of inputs or the number of outputs of a unit.
enum class Fan : uint8_t { in, out };
/// The nonlinearity that follows a layer.
enum class Nonlinearity : uint8_t { linear, sigmoid, tanh, relu, leaky_relu, selu };

/// Numbers of connections of one unit of a layer.
struct Fans {
  int64_t in;   ///< inputs of one output unit
  int64_t out;  ///< outputs of one input unit
};
/// Returns the sizes of axis 1 (in) and axis 0 (out) of a weight, each multiplied by the sizes of the remaining axes.
/// As in PyTorch, this also applies to the weight (in, out / groups, kernel...) of a transposed convolution. Throws
/// Error if the tensor has fewer than two axes.
Fans calculate_fans(const Tensor& tensor);

/// Returns the gain of a nonlinearity: the factor of the initial values that compensates for the change of scale by the
/// nonlinearity. `slope` is the negative slope of leaky_relu.
double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);

/// Options of kaiming_uniform_ and kaiming_normal_.
struct KaimingOptions {
  double a = 0;        ///< negative slope of the leaky_relu that follows the layer
  Fan mode = Fan::in;  ///< Fan::in preserves the scale of activations, Fan::out that of gradients
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};

/// Draws from U(-b, b) with b = gain * sqrt(3 / fan) (He et al., "Delving deep into rectifiers", ICCV 2015). Throws
/// Error if the fan is 0.
const Tensor& kaiming_uniform_(const Tensor& tensor, const KaimingOptions& options = {},
                               Generator* generator = nullptr);
/// Draws from the normal distribution with mean 0 and variance gain^2 / fan.
const Tensor& kaiming_normal_(const Tensor& tensor, const KaimingOptions& options = {}, Generator* generator = nullptr);
/// Draws from U(-b, b) with b = gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, "Understanding the difficulty
/// of training deep feedforward neural networks", AISTATS 2010).
const Tensor& xavier_uniform_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);
/// Draws from the normal distribution with mean 0 and variance 2 * gain^2 / (fan_in + fan_out).
const Tensor& xavier_normal_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);

/// During its lifetime, the random functions of this file leave tensors unchanged on this thread. The functions still
/// advance the generator as usual. Avoids the cost of initial values that the program overwrites, like
/// torch.nn.utils.skip_init.
class [[nodiscard]] SkipInit : ScopedValue<bool> {
 public:
  [[nodiscard]] SkipInit();
};

/// Draws from the uniform distribution on [low, high). Throws Error unless both bounds are finite and low <= high.
const Tensor& uniform_(const Tensor& tensor, double low = 0, double high = 1, Generator* generator = nullptr);
/// Draws from a normal distribution. Throws Error unless mean and std are finite and std >= 0.
const Tensor& normal_(const Tensor& tensor, double mean = 0, double std = 1, Generator* generator = nullptr);
/// Sets all elements to `value`.
const Tensor& constant_(const Tensor& tensor, double value);
/// Sets all elements to 0.
const Tensor& zeros_(const Tensor& tensor);
/// Sets all elements to 1.
const Tensor& ones_(const Tensor& tensor);

}  // namespace voxgrad::nn::init
