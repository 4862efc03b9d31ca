// The operator table: one case per operator and variant. tests/ops/op_table_test.cpp tests the values, gradients,
// second gradients, memory layouts, edge sizes and devices of each case.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "tests/ops/references.h"

namespace voxgrad::optest {

using reference::Array;
using reference::Arrays;

/// The range of the random elements of an input. Where needed, cases select a domain without kinks (points without a
/// derivative), poles and ties.
enum class Domain : uint8_t {
  any,       ///< [-2, 2]
  nonzero,   ///< magnitude in [0.3, 2], either sign
  positive,  ///< [0.5, 2]
  unit,      ///< [0.05, 0.95]
  distinct,  ///< any two elements differ by at least 0.1; centered at 0
  integers,  ///< whole numbers in [-8, 8]
  ties,      ///< whole numbers in [0, 2]
  boolean,   ///< dtype bool
  index,     ///< dtype i64, in [0, bound)
};

struct Input {
  Shape shape;
  Domain domain = Domain::any;
  int64_t bound = 0;           ///< exclusive upper bound of Domain::index
  bool differentiable = true;  ///< whether the gradient with respect to this input is tested

  bool is_floating() const { return domain != Domain::boolean && domain != Domain::index; }
};

using Function = std::function<Tensor(const Tensors& inputs)>;
using Reference = std::function<Array(const Arrays& inputs)>;

struct OpCase {
  std::string name;  ///< unique; determines the seed of the inputs
  Function function;
  std::vector<Input> inputs;
  Reference reference{};  ///< if empty, the result is compared with the CPU result
  /// Additional input shapes to test, with empty axes and axes of size 1. Each entry has one shape per input.
  std::vector<std::vector<Shape>> edges{};
  bool differentiable = true;
  bool once_differentiable = false;  ///< the gradients cannot be differentiated again
  double tolerance = 1e-5;           ///< allowed f32 error, relative to max(1, largest expected value)
  int roundings = 1;                 ///< 1 plus the number of intermediate tensors rounded to half precision
  bool exact = false;                ///< the results must equal the reference, for example because they are integers
  bool keeps_layout = false;         ///< channels-last inputs give a channels-last output
};

/// Returns all cases. Each add_*_cases() appends the cases of one op_cases_*.cpp file.
const std::vector<OpCase>& op_cases();
void add_elementwise_cases(std::vector<OpCase>& cases);
void add_shape_cases(std::vector<OpCase>& cases);
void add_reduction_cases(std::vector<OpCase>& cases);
void add_line_cases(std::vector<OpCase>& cases);
void add_conv_cases(std::vector<OpCase>& cases);
void add_volume_cases(std::vector<OpCase>& cases);
void add_loss_cases(std::vector<OpCase>& cases);
void add_sampling_cases(std::vector<OpCase>& cases);

/// Returns the inputs of a case on the CPU, floating-point inputs in f64. Their values are the same on every call.
/// `shapes` replaces the shapes of the case unless it is empty.
Tensors make_inputs(const OpCase& op_case, const std::vector<Shape>& shapes = {});

}  // namespace voxgrad::optest
