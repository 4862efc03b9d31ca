// The table of operators: one line an operator and form, from which tests/ops/op_table_test.cpp makes a test of
// its values, gradients, second gradients, memory layouts, edge sizes and devices.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "tests/ops/references.h"

namespace voxgrad::optest {

using reference::Array;
using reference::Arrays;

/// Which numbers an input holds: kinks, poles and ties are kept away from where a case needs it.
enum class Domain : uint8_t {
  any,       ///< [-2, 2]
  away,      ///< [0.3, 2] with either sign
  positive,  ///< [0.5, 2]
  unit,      ///< [0.05, 0.95]
  distinct,  ///< all different by at least 0.1, about 0
  integers,  ///< whole numbers in [-8, 8]
  ties,      ///< whole numbers in [0, 2]
  boolean,   ///< dtype bool
  index,     ///< dtype i64, in [0, bound)
};

struct Input {
  Shape shape;
  Domain domain = Domain::any;
  int64_t bound = 0;
  bool differentiable = true;

  bool floating() const { return domain != Domain::boolean && domain != Domain::index; }
};

using Function = std::function<Tensor(const Tensors& inputs)>;
using Reference = std::function<Array(const Arrays& inputs)>;

struct OpCase {
  std::string name;
  Function function;
  std::vector<Input> inputs;
  Reference reference{};
  /// Further shapes of the inputs: empty and size-1 axes.
  std::vector<std::vector<Shape>> edges{};
  bool differentiable = true;
  double tolerance = 1e-5;    ///< of f32, relative to the largest value
  int roundings = 1;          ///< of a half's result: 1, and 1 more for each intermediate tensor on its way
  bool exact = false;         ///< f32 must agree with the reference to the last bit (integers)
  bool keeps_layout = false;  ///< channels-last in, channels-last out
};

/// All of them. The parts are in op_cases*.cpp.
const std::vector<OpCase>& op_cases();
void add_elementwise_cases(std::vector<OpCase>& cases);
void add_shape_cases(std::vector<OpCase>& cases);
void add_reduction_cases(std::vector<OpCase>& cases);
void add_line_cases(std::vector<OpCase>& cases);
void add_conv_cases(std::vector<OpCase>& cases);
void add_volume_cases(std::vector<OpCase>& cases);
void add_loss_cases(std::vector<OpCase>& cases);
void add_sampling_cases(std::vector<OpCase>& cases);

/// The inputs of a case in f64 on the CPU, the same on every call, with the shapes given or its own.
Tensors make_inputs(const OpCase& op_case, const std::vector<Shape>& shapes = {});

}  // namespace voxgrad::optest
