// Tensors as text, in PyTorch's manner.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "core/autograd.h"

namespace voxgrad {
namespace {

constexpr int64_t kSummaryThreshold = 1000;  // more elements than this are shortened
constexpr int64_t kEdge = 3;                 // to so many at each end of an axis

/// How the numbers of one tensor are written: one style and one width for all.
class Format {
 public:
  Format(const Tensor& tensor, const std::vector<double>& shown) : dtype_(tensor.dtype()) {
    double largest = 0, smallest = std::numeric_limits<double>::infinity();
    bool whole = true;
    for (double value : shown) {
      if (!std::isfinite(value)) continue;
      whole &= value == std::nearbyint(value);
      largest = std::max(largest, std::abs(value));
      if (value != 0) smallest = std::min(smallest, std::abs(value));
    }
    scientific_ = largest >= 1e8 || (!whole && largest > 0 && (largest / smallest > 1e3 || smallest < 1e-4));
    whole_ = whole && !scientific_;
    for (double value : shown) width_ = std::max(width_, static_cast<int>(text(value).size()));
  }

  std::string operator()(double value) const {
    const std::string plain = text(value);
    return std::string(static_cast<size_t>(width_) - std::min(plain.size(), static_cast<size_t>(width_)), ' ') + plain;
  }

 private:
  std::string text(double value) const {
    if (dtype_ == b8) return value != 0 ? "true" : "false";
    char buffer[64];
    if (!is_floating(dtype_))
      std::snprintf(buffer, sizeof buffer, "%" PRId64, static_cast<int64_t>(value));
    else if (!std::isfinite(value))
      return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    else
      std::snprintf(buffer, sizeof buffer, scientific_ ? "%.4e" : whole_ ? "%.0f." : "%.4f", value);
    return buffer;
  }

  DType dtype_;
  bool scientific_ = false, whole_ = false;
  int width_ = 0;
};

/// The indices of one axis that are shown; -1 stands for "...".
std::vector<int64_t> shown_indices(int64_t size, bool shorten) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < size; ++i) {
    if (shorten && size > 2 * kEdge && i == kEdge) {
      indices.push_back(-1);
      i = size - kEdge;
    }
    indices.push_back(i);
  }
  return indices;
}

class Printer {
 public:
  explicit Printer(const Tensor& tensor) : tensor_(tensor), shorten_(tensor.numel() > kSummaryThreshold) {}

  void print(std::ostream& out) {
    Dims index = Dims::filled(tensor_.dim(), 0);
    if (tensor_.numel() > 0) visit(0, index, [&](const Dims& at) { shown_.push_back(tensor_.at(at)); });
    format_.emplace(tensor_, shown_);
    next_ = 0;
    if (tensor_.dim() == 0)
      out << (*format_)(shown_[0]);
    else
      bracket(out, 0);
  }

 private:
  template <class F>
  void visit(int64_t axis, Dims& index, const F& f) {
    if (axis == tensor_.dim()) return f(index);
    for (int64_t i : shown_indices(tensor_.shape()[axis], shorten_)) {
      if (i < 0) continue;
      index[axis] = i;
      visit(axis + 1, index, f);
    }
  }

  void bracket(std::ostream& out, int64_t axis) {
    const bool last = axis + 1 == tensor_.dim();
    out << '[';
    bool first = true;
    for (int64_t i : shown_indices(tensor_.numel() > 0 ? tensor_.shape()[axis] : 0, shorten_)) {
      if (!first) {
        out << (last ? ", " : ",");
        if (!last)
          out << std::string(static_cast<size_t>(tensor_.dim() - axis - 1), '\n')
              << std::string(static_cast<size_t>(axis) + 8, ' ');
      }
      first = false;
      if (i < 0)
        out << "...";
      else if (last)
        out << (*format_)(shown_[next_++]);
      else
        bracket(out, axis + 1);
    }
    out << ']';
  }

  const Tensor& tensor_;
  bool shorten_;
  std::vector<double> shown_;
  size_t next_ = 0;
  std::optional<Format> format_;
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
