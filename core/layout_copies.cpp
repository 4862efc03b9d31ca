#include "core/layout_copies.h"

#include "core/autograd.h"

namespace voxgrad {
namespace {
thread_local ScopedValue<LayoutCopies*>* newest = nullptr;
}  // namespace

LayoutCopies::LayoutCopies() : scope_(newest, this) {}

void LayoutCopies::note(const Tensor& from, MemoryFormat to) {
  if (!newest) return;
  const std::string gradient = autograd::running_node();
  const auto node = from.grad_fn();
  newest->value()->list_.push_back(concat(describe(from), " with strides ", from.strides(), " to ",
                                          to == MemoryFormat::channels_last ? "channels_last" : "contiguous",
                                          node ? ", made by '" + node->name + "'" : "",
                                          gradient.empty() ? "" : ", in the gradient of '" + gradient + "'"));
}

}  // namespace voxgrad
