#include "core/layout_copies.h"

#include "core/autograd.h"

namespace voxgrad {
namespace {
thread_local LayoutCopies* current = nullptr;
}  // namespace

LayoutCopies::LayoutCopies() : previous_(current) { current = this; }
LayoutCopies::~LayoutCopies() { current = previous_; }

void LayoutCopies::note(const Tensor& from, MemoryFormat to) {
  if (!current) return;
  const std::string gradient = autograd::running_node();
  const auto node = from.grad_fn();
  current->list_.push_back(concat(describe(from), " with strides ", from.strides(), " to ",
                                  to == MemoryFormat::channels_last ? "channels_last" : "contiguous",
                                  node ? ", made by '" + node->name + "'" : "",
                                  gradient.empty() ? "" : ", in the gradient of '" + gradient + "'"));
}

}  // namespace voxgrad
