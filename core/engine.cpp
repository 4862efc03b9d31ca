// Runs the recorded graph backward.
//
// The sequence number of a node is larger than the numbers of the nodes that produced its inputs. The engine therefore
// uses a heap to visit the reachable nodes in descending order of their numbers. When the engine visits a node, all
// gradients of the node's outputs have arrived. This order needs neither dependency counts nor recursion.
#include <algorithm>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "core/autograd.h"
#include "core/detail/context.h"

namespace voxgrad {
namespace {

/// Returns possible reasons why the tensor has no graph, for an error message. A tensor does not store the reason.
const char* why_no_graph(const Tensor& tensor) {
  if (!is_floating(tensor.dtype())) return "; only floating-point tensors have gradients";
  if (!grad_enabled()) return "; recording is off on this thread: a NoGradGuard is in effect";
  return "; either none of its inputs requires grad (frozen parameters?), "
         "or it was computed under a NoGradGuard, or it comes from detach()";
}

/// A running backward pass: its roots, which reached_leaves() uses, and its queued callbacks. `current` is the
/// innermost backward pass of the thread.
class Run {
 public:
  explicit Run(const std::vector<Edge>& from) : roots(from), restore_(current, this) {}

  void call() const {
    for (size_t i = 0; i < queued.size(); ++i) {  // a callback may queue more callbacks
      const std::function<void()> callback = queued[i];
      callback();
    }
  }

  static thread_local Run* current;
  const std::vector<Edge>& roots;
  std::vector<std::function<void()>> queued{};

 private:
  Restore<Run*> restore_;
};
thread_local Run* Run::current = nullptr;

/// Returns all nodes that can be reached from `roots`.
std::vector<Node*> reachable_from(const std::vector<Edge>& roots) {
  std::vector<Node*> reachable, stack;
  std::unordered_set<Node*> seen;
  const auto push = [&](const Edge& edge) {
    if (edge.node && seen.insert(edge.node.get()).second) stack.push_back(edge.node.get());
  };
  for (const Edge& root : roots) push(root);
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    reachable.push_back(node);
    for (const Edge& edge : node->edges) push(edge);
  }
  return reachable;
}

/// Orders nodes by their sequence numbers.
using Earlier = decltype([](const auto& a, const auto& b) { return a->sequence < b->sequence; });

class Engine {
 public:
  Engine(bool retain_graph, bool create_graph) : retain_(retain_graph || create_graph), create_(create_graph) {}

  /// Restricts the run to the nodes that lead to `wanted`. The run then collects the gradients of the wanted edges in
  /// `captured` and accumulates no gradients in leaves.
  void capture(std::vector<Edge> wanted, const std::vector<Edge>& roots) {
    wanted_ = std::move(wanted);
    captured.resize(wanted_.size());
    std::vector<Node*> reachable = reachable_from(roots);
    for (const Edge& edge : wanted_) needed_.insert(edge.node.get());
    std::ranges::sort(reachable, Earlier());
    for (const Node* node : reachable)
      for (const Edge& edge : node->edges)
        if (edge.node && needed_.contains(edge.node.get())) needed_.insert(node);
  }

  void run(const std::vector<Edge>& roots, const Tensors& gradients) {
    GradModeGuard mode(create_);
    const ContextGuard defaults{Context()};
    const Run this_run(roots);
    for (size_t i = 0; i < roots.size(); ++i) send(roots[i], gradients[i], "the caller");
    while (!ready_.empty()) {
      std::shared_ptr<Node> node = ready_.top();
      ready_.pop();
      auto entry = pending_.extract(node.get());
      visit(node, std::move(entry.mapped()));
    }
    this_run.call();
  }

  Tensors captured;

 private:
  struct Pending {
    Tensors grads;            // one per output
    std::vector<bool> owned;  // whether the engine computed the sum itself and may add to it in place
  };

  void send(const Edge& edge, const Tensor& grad, const std::string& from) {
    if (!edge.node || !grad.defined() || !is_needed(edge.node.get())) return;
    const Node::Output& to = edge.node->outputs[edge.output];
    check(grad.shape() == to.shape && grad.dtype() == to.dtype && grad.device() == to.device, "backward",
          "the gradient ", describe(grad), " from ", from, " does not match its tensor, which is ", to.shape, ' ',
          to.dtype, " on ", to.device);
    auto [entry, fresh] = pending_.try_emplace(edge.node.get());
    Pending& pending = entry->second;
    if (fresh) {
      pending.grads.resize(edge.node->outputs.size());
      pending.owned.resize(edge.node->outputs.size());
      ready_.push(edge.node);
    }
    Tensor& sum = pending.grads[edge.output];
    if (!sum.defined()) {
      sum = grad;
    } else if (pending.owned[edge.output]) {
      sum.add_(grad);
    } else {
      sum = sum.add(grad);
      pending.owned[edge.output] = !create_;
    }
  }

  void visit(const std::shared_ptr<Node>& node, Pending pending) {
    const profiler::Scope scope(profiler::Kind::backward, node->name, node->module);
    for (size_t i = 0; i < node->outputs.size(); ++i) {
      run_hooks(node->outputs[i].hooks, pending.grads[i]);
      if (const auto body = node->outputs[i].retained.lock()) accumulate(*body, pending.grads[i]);
    }
    if (node->leaf && node->leaf->autograd) run_hooks(node->leaf->autograd->hooks, pending.grads[0]);

    for (size_t i = 0; i < wanted_.size(); ++i)
      if (wanted_[i].node == node) captured[i] = pending.grads[wanted_[i].output];
    if (node->leaf) {
      if (!wanted_.empty() || !pending.grads[0].defined()) return;
      accumulate(*node->leaf, pending.grads[0]);
      Tensor leaf(node->leaf);
      if (leaf.requires_grad()) run_hooks(node->leaf->autograd->post_hooks, leaf);
      return;
    }
    const auto leads_to_needed_node = [&](const Edge& edge) { return edge.node && is_needed(edge.node.get()); };
    if (std::none_of(node->edges.begin(), node->edges.end(), leads_to_needed_node)) return;

    check(static_cast<bool>(node->backward), "backward", "the graph of '", node->name,
          "' was freed by an earlier backward pass; run that pass with retain_graph = true");
    const Tensors grads = node->backward(pending.grads);
    check(grads.size() == node->edges.size(), "backward", '\'', node->name,
          "' must return one gradient per input: expected ", node->edges.size(), ", got ", grads.size());
    for (size_t i = 0; i < grads.size(); ++i) send(node->edges[i], grads[i], '\'' + node->name + '\'');
    if (!retain_) node->backward = nullptr;
  }

  static void run_hooks(const Hooks& hooks, Tensor& grad) {
    if (!grad.defined() || hooks.empty()) return;
    const Hooks now = hooks;  // copied, because a hook may register more hooks
    for (const auto& hook : now) {
      const Hook call = *hook;  // copied, because a hook may remove itself
      if (!call) continue;
      Tensor changed = call(grad);
      if (!changed.defined()) continue;
      check(changed.shape() == grad.shape() && changed.dtype() == grad.dtype() && changed.device() == grad.device(),
            "hook", "the returned tensor is ", describe(changed), ", but the gradient is ", describe(grad));
      grad = std::move(changed);
    }
  }

  void accumulate(TensorBody& tensor, const Tensor& grad) {
    if (!grad.defined() || !tensor.autograd || !tensor.autograd->requires_grad) return;
    check(grad.dtype() == tensor.dtype && grad.device() == tensor.storage->device(), "backward",
          "a tensor was converted to ", tensor.dtype, " on ", tensor.storage->device(),
          " after the graph was recorded; its gradient is ", describe(grad));
    if (create_) return accumulate_recorded(*tensor.autograd, grad);
    const std::lock_guard lock(tensor.autograd->mutex);
    Tensor& sum = tensor.autograd->grad;
    if (sum.defined() && !sum.requires_grad() && !may_overlap(sum.shape(), sum.strides())) {
      sum.add_(grad);
    } else if (sum.defined()) {
      sum = sum.add(grad);
    } else {
      // Clone a gradient whose memory is shared, because a write to it could change another gradient. Also clone a
      // gradient that is contiguous in neither memory format.
      const bool is_only_reference = grad.body().use_count() == 1 && grad.storage().use_count() == 1 &&
                                     (grad.is_contiguous() || grad.is_contiguous(MemoryFormat::channels_last));
      sum = is_only_reference ? grad.detach() : grad.detach().clone();
    }
  }

  /// Adds a gradient while a graph is recorded. The sum is computed without holding data.mutex, because recording
  /// an operator can lock the mutexes of its operands. If another thread changed the gradient in the meantime, the sum
  /// is computed again.
  static void accumulate_recorded(AutogradData& data, const Tensor& grad) {
    const auto now = [&data] {
      const std::lock_guard lock(data.mutex);
      return data.grad;
    };
    for (Tensor before = now();; before = now()) {
      // A first gradient is cloned, because users may scale it in place.
      Tensor sum = before.defined() ? before.add(grad) : grad.clone();
      const std::lock_guard lock(data.mutex);
      if (data.grad.is_same(before)) return std::swap(data.grad, sum);
    }
  }

  bool is_needed(const Node* node) const { return wanted_.empty() || needed_.contains(node); }

  bool retain_, create_;
  std::vector<Edge> wanted_;
  std::unordered_set<const Node*> needed_;
  std::unordered_map<const Node*, Pending> pending_;
  std::priority_queue<std::shared_ptr<Node>, std::vector<std::shared_ptr<Node>>, Earlier> ready_;
};

std::vector<Edge> roots_of(const Tensors& outputs, const char* op) {
  std::vector<Edge> roots;
  for (const Tensor& output : outputs) {
    check(output.defined(), op, "the tensor is undefined");
    check(output.requires_grad(), op, "the tensor does not require grad and has no graph: ", describe(output),
          why_no_graph(output));
    roots.push_back(autograd::edge_to(output));
  }
  return roots;
}

/// Returns the gradients of the outputs. Checks their number. For an output of one element, a missing gradient is 1.
Tensors seeds(const Tensors& outputs, const Tensors& given, const char* op) {
  check(!outputs.empty(), op, "no outputs");
  check(given.empty() || given.size() == outputs.size(), op,
        "grad_outputs must have one gradient per output: expected ", outputs.size(), ", got ", given.size());
  Tensors gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor& output = outputs[i];
    if (i < given.size() && given[i].defined()) {
      gradients.push_back(given[i]);
      continue;
    }
    check(output.numel() == 1, op, "only the gradient of a one-element output may be omitted; the output is ",
          describe(output));
    Tensor one = empty(output.shape(), output.options());
    one.fill_(1);
    gradients.push_back(one);
  }
  return gradients;
}

}  // namespace

void autograd::queue_callback(std::function<void()> callback) {
  check(static_cast<bool>(callback), "queue_callback", "the callback is empty");
  check(Run::current != nullptr, "queue_callback", "no backward pass is running on this thread");
  Run::current->queued.push_back(std::move(callback));
}

std::unordered_set<const TensorBody*> autograd::reached_leaves() {
  check(Run::current != nullptr, "reached_leaves", "no backward pass is running on this thread");
  std::unordered_set<const TensorBody*> leaves;
  for (const Node* node : reachable_from(Run::current->roots))
    if (node->leaf) leaves.insert(node->leaf.get());
  return leaves;
}

void autograd::backward(const Tensors& outputs, const Tensors& grad_outputs, bool retain_graph, bool create_graph) {
  const std::vector<Edge> roots = roots_of(outputs, "backward");
  const Tensors gradients = seeds(outputs, grad_outputs, "backward");
  Engine(retain_graph, create_graph).run(roots, gradients);
}

Tensors autograd::grad(const Tensors& outputs, const Tensors& inputs, const Tensors& grad_outputs, bool retain_graph,
                       bool create_graph, bool allow_unused) {
  check(!inputs.empty(), "grad", "no inputs");
  const std::vector<Edge> roots = roots_of(outputs, "grad");
  const Tensors gradients = seeds(outputs, grad_outputs, "grad");
  Engine engine(retain_graph, create_graph);
  engine.capture(roots_of(inputs, "grad"), roots);
  engine.run(roots, gradients);
  for (size_t i = 0; i < inputs.size(); ++i)
    check(allow_unused || engine.captured[i].defined(), "grad", "the outputs do not depend on input ", i,
          "; with allow_unused = true, its gradient is an undefined tensor");
  return engine.captured;
}

}  // namespace voxgrad
