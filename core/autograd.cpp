// Implements the recorded graph: nodes, grad mode, version checks, hooks and recomputation.
#include "core/autograd.h"

#include <atomic>

#include "core/detail/context.h"

namespace voxgrad {
namespace {

thread_local ScopedValue<bool>* grad_mode = nullptr;
std::atomic<uint64_t> next_sequence{1};

AutogradData& data_of(const Tensor& tensor) {
  check(tensor.defined(), "autograd", "the tensor is undefined");
  auto& data = tensor.body()->autograd;
  if (!data) data = std::make_unique<AutogradData>();
  return *data;
}

const AutogradData* find_data(const Tensor& tensor) {
  check(tensor.defined(), "autograd", "the tensor is undefined");
  return tensor.body()->autograd.get();
}

/// Makes `tensor` the output of a recorded operation.
void attach(const Tensor& tensor, Edge source) {
  AutogradData& data = data_of(tensor);
  data.requires_grad = true;
  data.source = std::move(source);
}

}  // namespace

/// Deletes nodes iteratively. Deleting a node can release other nodes, which are added to a queue instead of being
/// deleted recursively. The queue is linked through the nodes, so it needs no allocation that could fail.
void Node::destroy(Node* node) noexcept {
  thread_local Node* queue = nullptr;
  thread_local bool running = false;
  node->next_dead_ = std::exchange(queue, node);
  if (running) return;
  running = true;
  while (queue) {
    Node* next = queue;
    queue = next->next_dead_;
    delete next;
  }
  running = false;
}

std::shared_ptr<Node> Node::make(std::string name) {
  std::shared_ptr<Node> node(new Node(std::move(name)), destroy);
  node->sequence = next_sequence++;
  return node;
}

Edge autograd::edge_to(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  AutogradData& data = data_of(tensor);
  if (data.source.node) return data.source;
  const std::lock_guard lock(data.mutex);
  std::shared_ptr<Node> node = data.accumulator.lock();
  if (!node) {
    node = Node::make("accumulate_grad");
    node->outputs.push_back({tensor.shape(), tensor.dtype(), tensor.device()});
    node->leaf = tensor.body();
    data.accumulator = node;
  }
  return {node, 0};
}

bool grad_enabled() { return grad_mode == nullptr || grad_mode->value(); }
GradModeGuard::GradModeGuard(bool enabled) : ScopedValue(grad_mode, enabled) {}

bool needs_grad(const Tensors& inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

void check_in_place(const char* op, const Tensor& target, const Tensor& source) {
  check(target.defined(), op, "the target is undefined");
  check(
      !needs_grad({target, source}), op,
      "an in-place write is not recorded, but the target or the source requires grad; use NoGradGuard or an operation "
      "that returns a new tensor");
  check(!may_overlap(target.shape(), target.strides()), op,
        "elements of the target share memory (an expanded view?): ", describe(target), " with strides ",
        target.strides());
}

namespace {
class RecomputedCall;
}

/// The description of a saved tensor, and the tensor after it has been recomputed.
struct Saved::Recomputed {
  std::shared_ptr<RecomputedCall> call;
  Edge source;  // the members from source to options describe the tensor when it was saved
  Shape shape;
  Strides strides;
  TensorOptions options;
  Saved found{};
};

namespace {

/// A call of a function by recompute(). The tensors that operations within the function save are numbered. The first
/// run stores a description of each saved tensor. The second run, in the backward pass, keeps the tensors whose numbers
/// are still needed, and ends as soon as it has reached the last number.
class RecomputedCall : public std::enable_shared_from_this<RecomputedCall> {
 public:
  RecomputedCall(std::function<Tensors(const Tensors&)> function, const Tensors& inputs)
      : function_(std::move(function)), inputs_(inputs.begin(), inputs.end()) {}

  Tensors run(const Tensors& inputs) {
    const Restore current(current_, this);
    const Restore running(running_, true);
    next_ = 0;
    return function_(inputs);
  }
  /// Returns the tensor that `entry` describes. Runs the function again if the tensor has not been recomputed yet.
  const Tensor& get(Saved::Recomputed& entry) {
    const std::lock_guard lock(mutex_);
    if (!entry.found.defined()) run_again();
    return entry.found();
  }
  static bool recomputing() { return second_runs_ > 0; }
  /// Returns the description of a tensor that an operation saves in the first run. Returns null in the second run and
  /// outside of recomputed functions; then Saved keeps the tensor itself.
  static std::shared_ptr<Saved::Recomputed> add_saved(const Tensor& tensor) {
    RecomputedCall* call = current_;
    if (!call || !grad_enabled()) return nullptr;
    const size_t number = call->next_++;
    if (call->recomputing_) {
      call->keep_recomputed(number, tensor);
      if (call->next_ == call->saved_.size()) throw Complete();
      return nullptr;
    }
    const AutogradData* data = find_data(tensor);
    const auto entry = std::make_shared<Saved::Recomputed>(Saved::Recomputed{.call = call->shared_from_this(),
                                                                             .source = data ? data->source : Edge(),
                                                                             .shape = tensor.shape(),
                                                                             .strides = tensor.strides(),
                                                                             .options = tensor.options()});
    call->saved_.push_back(entry);
    return entry;
  }

 private:
  /// Thrown in the second run when every saved tensor is recomputed: the rest of the function is not needed.
  struct Complete {};

  void run_again() {
    check(!running_, "recompute", "a recomputed function cannot compute gradients of its own results");
    Tensors inputs;
    for (const Saved& input : inputs_) inputs.push_back(input());
    const GradModeGuard mode(true);
    const Restore recomputing(recomputing_, true);
    const Restore second_runs(second_runs_, second_runs_ + 1);
    try {
      const ContextGuard as_before(context_);
      found_.clear();
      run(inputs);
    } catch (const Complete&) {
    }
    check(next_ == saved_.size(), "recompute", "the number of tensors that the function's operations saved is ",
          saved_.size(), " in the first call, but ", next_, " in the second call");
    for (auto& [entry, tensor] : found_) entry->found = std::move(tensor);
    found_.clear();
  }

  void keep_recomputed(size_t number, const Tensor& tensor) {
    const auto entry = number < saved_.size() ? saved_[number].lock() : nullptr;
    if (!entry) return;
    const Saved::Recomputed& first = *entry;
    check(tensor.shape() == first.shape && tensor.strides() == first.strides && tensor.dtype() == first.options.dtype &&
              tensor.device() == first.options.device,
          "recompute", "the function's operations saved a tensor ", first.shape, ' ', first.options.dtype, " on ",
          first.options.device, " with strides ", first.strides, " in the first call, but in the second call ",
          describe(tensor), " with strides ", tensor.strides());
    const Tensor kept = tensor.detach();
    if (first.source.node) attach(kept, first.source);
    const Restore outside(current_, static_cast<RecomputedCall*>(nullptr));  // Saved keeps the tensor itself
    found_.emplace_back(entry, Saved(kept));
  }

  static inline thread_local RecomputedCall* current_ = nullptr;
  /// The number of second runs in progress. A second run may contain first runs of nested calls.
  static inline thread_local int second_runs_ = 0;

  std::function<Tensors(const Tensors&)> function_;
  std::vector<Saved> inputs_;
  Context context_ = Context::current();
  std::vector<std::weak_ptr<Saved::Recomputed>> saved_;
  std::vector<std::pair<std::shared_ptr<Saved::Recomputed>, Saved>> found_;  // tensors of the second run
  size_t next_ = 0;
  bool running_ = false;        // whether the function is running
  bool recomputing_ = false;    // whether the second run is in progress
  std::recursive_mutex mutex_;  // held by the backward pass that runs the function again
};

}  // namespace

Saved::Saved(const Tensor& tensor) {
  if (!tensor.defined()) return;
  // Leaves that require grad are not recomputed: they stay allocated in any case, and a recomputed copy would not
  // accumulate the gradient of the leaf.
  if (!tensor.requires_grad() || !tensor.is_leaf()) recomputed_ = RecomputedCall::add_saved(tensor);
  if (recomputed_) return;
  tensor_ = tensor;
  version_ = tensor.storage()->version();
}

const Tensor& Saved::operator()() const {
  if (recomputed_) return recomputed_->call->get(*recomputed_);
  const uint64_t now = tensor_.defined() ? tensor_.storage()->version() : version_;
  check(now == version_, "backward", "a tensor needed for the gradient was written to in place: ", describe(tensor_),
        " is at version ", now, " but was saved at version ", version_);
  return tensor_;
}

bool autograd::recomputing() { return RecomputedCall::recomputing(); }

Tensors autograd::recompute(std::function<Tensors(const Tensors&)> function, const Tensors& inputs) {
  check(static_cast<bool>(function), "recompute", "the function is empty");
  if (!grad_enabled()) return function(inputs);
  return std::make_shared<RecomputedCall>(std::move(function), inputs)->run(inputs);
}

autograd::SavedOutput::SavedOutput(const Tensor& output)
    : detached_(output.detach()), node_(output.grad_fn()), output_(data_of(output).source.output) {}

Tensor autograd::SavedOutput::operator()() const {
  Tensor tensor = detached_().detach();
  if (auto node = node_.lock(); node && grad_enabled()) attach(tensor, {std::move(node), output_});
  return tensor;
}

void autograd::record(const char* name, const Tensors& outputs, const Tensors& inputs, Backward backward) {
  if (!needs_grad(inputs)) return;
  std::vector<Edge> edges;
  for (const Tensor& input : inputs) edges.push_back(edge_to(input));
  auto node = Node::make(name);  // created after the accumulators of its inputs, so that its sequence number is larger
  if (profiler::active()) node->module = profiler::place().module;
  node->edges = std::move(edges);
  for (const Tensor& output : outputs) {
    for (const Tensor& input : inputs)
      check(!output.is_same(input), name, "an output is one of the inputs; return a view or a copy");
    if (is_floating(output.dtype())) attach(output, {node, node->outputs.size()});
    node->outputs.push_back({output.shape(), output.dtype(), output.device()});
  }
  node->backward = std::move(backward);
}

void autograd::once_differentiable(const char* op) {
  check(!grad_enabled(), op, "its gradient cannot be differentiated again (create_graph = true)");
}

Tensors custom_function(const char* name, const Tensors& inputs, const std::function<Tensors(const Tensors&)>& forward,
                        Backward backward) {
  check(forward && backward, name, "forward or backward is empty");
  Tensors outputs;
  {
    NoGradGuard no_grad;
    outputs = forward(inputs);
  }
  for (const Tensor& output : outputs) {
    check(output.defined(), name, "forward returned an undefined tensor");
    for (const Tensor& input : inputs)
      check(!output.is_same(input), name, "an output is one of the inputs; return a view or a copy");
    check(!output.requires_grad(), name,
          "forward returned an existing tensor, which requires grad; return a view or a copy");
  }
  autograd::record(name, outputs, inputs, std::move(backward));
  return outputs;
}

bool Tensor::requires_grad() const {
  const AutogradData* data = find_data(*this);
  return data && data->requires_grad;
}

const Tensor& Tensor::requires_grad_(bool value) const {
  check(is_leaf() || value, "requires_grad_", "cannot be switched off for the result of an operation; use detach()");
  check(!value || is_floating(dtype()), "requires_grad_", "only floating-point tensors have gradients, got ",
        describe(*this));
  if (value || body_->autograd) data_of(*this).requires_grad = value;
  return *this;
}

bool Tensor::is_leaf() const { return grad_fn() == nullptr; }

Tensor Tensor::grad() const {
  if (!find_data(*this)) return {};
  AutogradData& data = data_of(*this);
  const std::lock_guard lock(data.mutex);
  return data.grad;
}

void Tensor::set_grad(const Tensor& grad) const {
  if (grad.defined())
    check(grad.shape() == shape() && grad.dtype() == dtype() && grad.device() == device(), "set_grad",
          "the gradient is ", describe(grad), ", the tensor is ", describe(*this));
  AutogradData& data = data_of(*this);
  const std::lock_guard lock(data.mutex);
  data.grad = grad;
}

std::shared_ptr<Node> Tensor::grad_fn() const {
  const AutogradData* data = find_data(*this);
  return data ? data->source.node : nullptr;
}

Tensor Tensor::detach() const { return as_strided(*this, shape(), strides(), storage_offset()); }

namespace {
HookHandle add_hook(Hooks& hooks, Hook hook) {
  std::erase_if(hooks, [](const auto& registered) { return !*registered; });
  hooks.push_back(std::make_shared<Hook>(std::move(hook)));
  return HookHandle(hooks.back());
}
}  // namespace

HookHandle Tensor::register_hook(Hook hook) const {
  check(requires_grad(), "register_hook", "the tensor does not require grad");
  check(static_cast<bool>(hook), "register_hook", "the hook is empty");
  AutogradData& data = data_of(*this);
  const auto& [node, output] = data.source;
  return add_hook(node ? node->outputs[output].hooks : data.hooks, std::move(hook));
}

HookHandle Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> hook) const {
  constexpr const char* kOp = "register_post_accumulate_grad_hook";
  check(requires_grad() && is_leaf(), kOp, "the tensor must be a leaf that requires grad");
  check(static_cast<bool>(hook), kOp, "the hook is empty");
  return add_hook(data_of(*this).post_hooks,
                  [hook = std::move(hook)](const Tensor& leaf) { return hook(leaf), Tensor(); });
}

void Tensor::retain_grad() const {
  check(requires_grad(), "retain_grad", "the tensor does not require grad");
  const auto& [node, output] = data_of(*this).source;
  if (node) node->outputs[output].retained = body_;
}

void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  autograd::backward({*this}, {gradient}, retain_graph, create_graph);
}

}  // namespace voxgrad
