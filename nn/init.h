// Initial values of parameters. Each function fills its tensor in place, unrecorded, and returns it; the
// definitions of fan and gain are PyTorch's.
#pragma once

#include "../core/random.h"
#include "../core/scoped_value.h"
#include "../core/tensor.h"

namespace voxgrad::nn::init {

enum class Fan : uint8_t { in, out };
enum class Nonlinearity : uint8_t { linear, sigmoid, tanh, relu, leaky_relu, selu };

/// Inputs to, and outputs from, one unit: sizes of axes 1 and 0, each times the product of the further axes.
/// For a transposed convolution's (in, out / groups, ...) weight this too follows PyTorch. Throws below two axes.
struct Fans {
  int64_t in, out;
};
Fans calculate_fans(const Tensor& tensor);

/// The factor that keeps a signal's scale through `nonlinearity`; `slope` is leaky_relu's.
double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);

struct KaimingOptions {
  double a = 0;  ///< negative slope of the leaky_relu that follows
  Fan mode = Fan::in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};

/// He et al., "Delving deep into rectifiers", ICCV 2015: U(-b, b) with b = gain sqrt(3 / fan).
const Tensor& kaiming_uniform_(const Tensor& tensor, const KaimingOptions& options = {},
                               Generator* generator = nullptr);
/// The same, N(0, gain^2 / fan).
const Tensor& kaiming_normal_(const Tensor& tensor, const KaimingOptions& options = {}, Generator* generator = nullptr);
/// Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010:
/// U(-b, b) with b = gain sqrt(6 / (fan_in + fan_out)).
const Tensor& xavier_uniform_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);
/// The same, N(0, 2 gain^2 / (fan_in + fan_out)).
const Tensor& xavier_normal_(const Tensor& tensor, double gain = 1, Generator* generator = nullptr);

/// While it lives, the functions of this thread that draw leave tensors as they are, and generators as if they had
/// drawn: for layers whose parameters are set right after. torch.nn.utils.skip_init.
class [[nodiscard]] SkipInit {
 public:
  [[nodiscard]] SkipInit();

 private:
  ScopedValue<bool> skip_;
};

/// Throws unless low <= high, both finite.
const Tensor& uniform_(const Tensor& tensor, double low = 0, double high = 1, Generator* generator = nullptr);
/// Throws unless std >= 0, both finite.
const Tensor& normal_(const Tensor& tensor, double mean = 0, double std = 1, Generator* generator = nullptr);
/// A normal distribution limited to [a, b], by the inverse of its distribution function. Throws unless std > 0 and [a,
/// b] has a probability above 0.
const Tensor& trunc_normal_(const Tensor& tensor, double mean = 0, double std = 1, double a = -2, double b = 2,
                            Generator* generator = nullptr);
const Tensor& constant_(const Tensor& tensor, double value);
const Tensor& zeros_(const Tensor& tensor);
const Tensor& ones_(const Tensor& tensor);

}  // namespace voxgrad::nn::init
