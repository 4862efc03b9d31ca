// Generates the inputs of the operator test cases (op_cases.h) and collects the cases in one list.
#include "tests/ops/op_cases.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "ops/create.h"

namespace voxgrad::optest {
namespace {

/// Returns a uniform number in [0, 1). The sequence is the same on every platform.
double uniform(std::mt19937_64& engine) { return static_cast<double>(engine() >> 11) * 0x1p-53; }

/// Draws `count` numbers from the domain of the input.
std::vector<double> draw(const Input& input, int64_t count, std::mt19937_64& engine) {
  std::vector<double> values(static_cast<size_t>(count));
  if (input.domain == Domain::distinct) {
    std::iota(values.begin(), values.end(), -static_cast<double>(count) / 2);
    std::shuffle(values.begin(), values.end(), engine);
    for (double& value : values) value = 0.2 * value + 0.1 * uniform(engine);
    return values;
  }
  for (double& value : values) {
    const double u = uniform(engine);
    switch (input.domain) {
      case Domain::any:
        value = 4 * u - 2;
        break;
      case Domain::nonzero:
        value = u < 0.5 ? 3.4 * u - 2 : 3.4 * (u - 0.5) + 0.3;
        break;
      case Domain::positive:
        value = 0.5 + 1.5 * u;
        break;
      case Domain::unit:
        value = 0.05 + 0.9 * u;
        break;
      case Domain::integers:
        value = std::floor(17 * u) - 8;
        break;
      case Domain::ties:
        value = std::floor(3 * u);
        break;
      case Domain::boolean:
        value = u < 0.5;
        break;
      case Domain::index:
        value = std::floor(static_cast<double>(input.bound) * u);
        break;
      case Domain::distinct:
        break;
    }
  }
  return values;
}

DType dtype_for(Domain domain) {
  if (domain == Domain::boolean) return b8;
  return domain == Domain::index ? i64 : f64;
}

}  // namespace

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases = [] {
    std::vector<OpCase> all;
    add_elementwise_cases(all);
    add_shape_cases(all);
    add_reduction_cases(all);
    add_line_cases(all);
    add_conv_cases(all);
    add_volume_cases(all);
    add_loss_cases(all);
    add_sampling_cases(all);
    return all;
  }();
  return cases;
}

Tensors make_inputs(const OpCase& op_case, const std::vector<Shape>& shapes) {
  uint64_t seed = 0;
  for (char c : op_case.name) seed = seed * 131 + static_cast<unsigned char>(c);
  std::mt19937_64 engine(seed);
  Tensors inputs;
  for (size_t i = 0; i < op_case.inputs.size(); ++i) {
    const Input& input = op_case.inputs[i];
    const Shape shape = shapes.empty() ? input.shape : shapes[i];
    const std::vector<double> values = draw(input, numel(shape), engine);
    inputs.push_back(from_span<double>(values, shape).to(dtype_for(input.domain)));
  }
  return inputs;
}

}  // namespace voxgrad::optest
