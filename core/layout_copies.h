// A debugging aid: which copies between memory layouts operators make.
#pragma once

#include <string>
#include <vector>

#include "scoped_value.h"
#include "tensor.h"

namespace voxgrad {

/// While it lives, the copies to another layout that are made on this thread, by contiguous() in the program or within
/// operators, are listed: shape, dtype, strides, the format asked for, and the operation that made the tensor, or whose
/// gradient is being computed. What a kernel rearranges in a workspace of its own does not count. Lists may nest; the
/// innermost takes notes.
///
///   vg::LayoutCopies copies;
///   model(x).sum().backward();
///   for (const std::string& copy : copies.list()) std::cerr << copy << '\n';
class [[nodiscard]] LayoutCopies {
 public:
  [[nodiscard]] LayoutCopies();

  const std::vector<std::string>& list() const { return list_; }
  /// Called by what copies `from`.
  static void note(const Tensor& from, MemoryFormat to);

 private:
  std::vector<std::string> list_;
  ScopedValue<LayoutCopies*> scope_;
};

}  // namespace voxgrad
