// Prints tensors in the format of PyTorch.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "core/autograd.h"

namespace voxgrad {
namespace {

constexpr int64_t kSummaryThreshold = 1000;  // tensors with more elements are abbreviated
constexpr int64_t kEdge = 3;                 // elements printed at each end of an abbreviated axis

constexpr int64_t kLineWidth = 80;

/// Formats floating-point elements. All have the same style: whole numbers, four decimals, or an exponent.
std::vector<std::string> texts_of(const std::vector<double>& values) {
  double largest = 0, smallest = std::numeric_limits<double>::infinity();
  bool whole = true;
  for (double value : values) {
    if (!std::isfinite(value)) continue;
    whole &= value == std::nearbyint(value);
    largest = std::max(largest, std::abs(value));
    if (value != 0) smallest = std::min(smallest, std::abs(value));
  }
  const bool scientific = largest >= 1e8 || (!whole && largest > 0 && (largest / smallest > 1e3 || smallest < 1e-4));
  std::vector<std::string> texts;
  for (double value : values) {
    char text[64];
    std::snprintf(text, sizeof text, scientific ? "%.4e" : whole ? "%.0f." : "%.4f", value);
    texts.push_back(std::isnan(value) ? "nan" : std::isinf(value) ? (value > 0 ? "inf" : "-inf") : text);
  }
  return texts;
}

/// Formats the elements in row-major order, padded to a common width.
std::vector<std::string> texts_of(const Tensor& tensor) {
  const Tensor dense = tensor.contiguous();
  std::vector<std::string> texts;
  if (is_floating(tensor.dtype()))
    texts = texts_of(dense.to_vector());
  else
    for (int64_t value : dense.to_vector<int64_t>())
      texts.push_back(tensor.dtype() != b8 ? std::to_string(value) : value ? "true" : "false");
  size_t width = 0;
  for (const std::string& text : texts) width = std::max(width, text.size());
  for (std::string& text : texts) text.insert(0, width - text.size(), ' ');
  return texts;
}

/// Keeps only the first and last kEdge elements along each axis of more than 2 * kEdge elements. The result is on the
/// device of the tensor.
Tensor edges_of(Tensor tensor) {
  while (true) {
    const Shape& sizes = tensor.shape();
    const int64_t axis = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
    const int64_t size = sizes[axis];
    if (size <= 2 * kEdge) return tensor;
    Shape shape = sizes;
    shape[axis] = 2 * kEdge;
    const Tensor ends = empty(shape, tensor.options());
    ends.narrow(axis, 0, kEdge).copy_(tensor.narrow(axis, 0, kEdge));
    ends.narrow(axis, kEdge, kEdge).copy_(tensor.narrow(axis, size - kEdge, kEdge));
    tensor = ends;
  }
}

class Printer {
 public:
  explicit Printer(const Tensor& tensor) : shape_(tensor.shape()), shorten_(tensor.numel() > kSummaryThreshold) {
    NoGradGuard no_grad;
    texts_ = texts_of(shorten_ ? edges_of(tensor) : tensor);
  }

  void print(std::ostream& out) {
    if (texts_.empty())
      out << "[]";
    else if (shape_.empty())
      out << texts_[0];
    else
      bracket(out, 0);
  }

 private:
  /// Prints one axis: its slices in brackets, or, for the last axis, its elements in lines of at most kLineWidth
  /// characters.
  void bracket(std::ostream& out, int64_t axis) {
    const bool last = axis + 1 == shape_.size(), cut = shorten_ && shape_[axis] > 2 * kEdge;
    const int64_t parts = cut ? 2 * kEdge + 1 : shape_[axis];
    const int64_t indent = axis + 8;  // "tensor(" and a bracket for each axis
    const int64_t line = std::max<int64_t>(1, (kLineWidth + 1 - indent) / (std::ssize(texts_[0]) + 2));
    out << '[';
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t breaks = !last ? shape_.size() - axis - 1 : i % line == 0;
      if (i > 0) out << (breaks ? "," : ", ");
      if (i > 0 && breaks)
        out << std::string(static_cast<size_t>(breaks), '\n') << std::string(static_cast<size_t>(indent), ' ');
      if (cut && i == kEdge)
        out << "...";
      else if (last)
        out << texts_[next_++];
      else
        bracket(out, axis + 1);
    }
    out << ']';
  }

  const Shape shape_;
  const bool shorten_;
  std::vector<std::string> texts_;
  size_t next_ = 0;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  if (!tensor.defined()) return out << "tensor(undefined)";
  out << "tensor(";
  Printer(tensor).print(out);
  out << ", shape=" << tensor.shape() << ", dtype=" << tensor.dtype() << ", device=" << tensor.device();
  if (const auto node = tensor.grad_fn())
    out << ", grad_fn=" << node->name;
  else if (tensor.requires_grad())
    out << ", requires_grad=true";
  return out << ')';
}

std::string to_string(const Tensor& tensor) { return concat(tensor); }

}  // namespace voxgrad
