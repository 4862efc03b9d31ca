// Initial values of parameters. Each function fills a tensor in place, without recording a graph, and returns the
// tensor. `fan` and `gain` are defined as in PyTorch. A null generator selects the default generator. U(-b, b) is the
// uniform distribution on [-b, b).
#pragma once

#include "../core/random.h"
#include "../core/scoped_value.h"
#include "../core/tensor.h"

namespace voxgrad::nn::init {

/// Selects the fan that determines the scale of the initial values: Fans::in or Fans::out.
enum class Fan : uint8_t { in, out };
/// The nonlinearity that follows a layer.
enum class Nonlinearity : uint8_t { linear, sigmoid, tanh, relu, leaky_relu, selu };

/// The numbers of connections between the inputs and the outputs of a layer.
struct Fans {
  int64_t in;   ///< number of inputs that contribute to one output
  int64_t out;  ///< number of outputs to which one input contributes
};
/// Returns the sizes of axis 1 (in) and axis 0 (out) of a weight, each multiplied by the sizes of the remaining axes.
/// As in PyTorch, this also applies to the weight (in, out / groups, kernel...) of a transposed convolution. Throws
/// Error if the tensor has fewer than two axes.
Fans calculate_fans(const Tensor& tensor);

/// Returns the gain of a nonlinearity. Initial values are multiplied by the gain, which compensates for the change of
/// scale that the nonlinearity causes. `slope` is the negative slope of leaky_relu.
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
/// Draws from the normal distribution with mean 0 and variance gain^2 / fan. Throws Error if the fan is 0.
const Tensor& kaiming_normal_(const Tensor& tensor, const KaimingOptions& options = {}, Generator* generator = nullptr);
/// Draws from U(-b, b) with b = gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, "Understanding the difficulty
/// of training deep feedforward neural networks", AISTATS 2010).
const Tensor& xavier_uniform_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);
/// Draws from the normal distribution with mean 0 and variance 2 * gain^2 / (fan_in + fan_out).
const Tensor& xavier_normal_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);

/// While a SkipInit object exists, the random functions of this file leave tensors unchanged on this thread, but still
/// advance the generator. This avoids the cost of initial values that the program overwrites, as
/// torch.nn.utils.skip_init does.
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
