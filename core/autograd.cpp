#include "core/autograd.h"

#include <atomic>
#include <mutex>
#include <optional>

#include "core/autocast.h"
#include "core/communicator.h"
#include "core/random.h"

namespace voxgrad {
namespace {

thread_local ScopedValue<bool>* grad_mode = nullptr;

/// Sets a variable for as long as it lives.
template <class T>
class Restore {
 public:
  [[nodiscard]] Restore(T& variable, T value) : variable_(variable), previous_(std::exchange(variable, value)) {}
  ~Restore() { variable_ = previous_; }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

 private:
  T& variable_;
  T previous_;
};
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

}  // namespace

/// Deletes nodes one after the other: a node's death may free others, which queue up here instead of nesting, however
/// long the chain. The queue is linked through the nodes, as there may be no memory left to take.
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
  if (data.grad_fn) return {data.grad_fn, data.output};
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
GradModeGuard::GradModeGuard(bool enabled) : enabled_(grad_mode, enabled) {}

bool needs_grad(const Tensors& inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

void check_in_place(const char* op, const Tensor& target, const Tensor& source) {
  check(target.defined(), op, "the target is undefined");
  check(!needs_grad({target, source}), op,
        "an in-place write is not recorded, and a tensor here requires grad; use NoGradGuard or the function form");
  check(!may_overlap(target.shape(), target.strides()), op,
        "elements of the target share memory (an expanded view?): ", describe(target), " with strides ",
        target.strides());
}

namespace {
void check_version(const Tensor& tensor, uint64_t saved) {
  const uint64_t now = tensor.storage()->version();
  check(now == saved, "backward", "a tensor needed for the gradient was written to in place: ", describe(tensor),
        " is at version ", now, ", was saved at version ", saved);
}
}  // namespace

namespace {

/// A call of a recomputed function. While it runs, what operations save is numbered: the first time to be found
/// again, the second time to be kept.
class CheckpointedCall : public std::enable_shared_from_this<CheckpointedCall> {
 public:
  CheckpointedCall(std::function<Tensors(const Tensors&)> function, const Tensors& inputs);

  Tensors first(const Tensors& inputs) { return run(inputs); }
  /// What `entry` was saved for.
  const Tensor& get(Saved::Recomputed& entry);
  static bool recomputing() { return current_ && current_->recomputing_; }
  /// Of the call under way on this thread, null if there is none: see Saved's constructor.
  static std::shared_ptr<Saved::Recomputed> note(const Tensor& tensor);

 private:
  Tensors run(const Tensors& inputs);
  void again();
  void find(size_t number, const Tensor& tensor);

  static inline thread_local CheckpointedCall* current_ = nullptr;

  std::function<Tensors(const Tensors&)> function_;
  std::vector<Saved> inputs_;
  GeneratorState random_;
  std::optional<DType> autocast_;
  distributed::Communicator* spatial_group_;
  std::vector<std::weak_ptr<Saved::Recomputed>> saved_;
  std::vector<std::pair<std::shared_ptr<Saved::Recomputed>, Saved>> found_;  // by the second call
  size_t next_ = 0;
  bool running_ = false, recomputing_ = false;
  std::recursive_mutex mutex_;  // of backward passes
};

}  // namespace

/// What the operation that saved it gets from the second call.
struct Saved::Recomputed {
  std::shared_ptr<CheckpointedCall> call;
  std::shared_ptr<Node> grad_fn;  // of the tensor as it was saved, as what follows
  size_t output = 0;
  Shape shape;
  Strides strides;
  TensorOptions options;
  Saved found;
};

namespace {

CheckpointedCall::CheckpointedCall(std::function<Tensors(const Tensors&)> function, const Tensors& inputs)
    : function_(std::move(function)),
      inputs_(inputs.begin(), inputs.end()),
      random_(default_generator().state()),
      autocast_(autocast::dtype()),
      spatial_group_(distributed::spatial_group()) {}

Tensors CheckpointedCall::run(const Tensors& inputs) {
  const Restore current(current_, this);
  const Restore running(running_, true);
  next_ = 0;
  return function_(inputs);
}

void CheckpointedCall::again() {
  check(!running_, "recompute", "a gradient of what a recomputed function computes cannot be taken within it");
  Tensors inputs;
  for (const Saved& input : inputs_) inputs.push_back(input());
  const GradModeGuard mode(true);
  const autocast guard(autocast_.value_or(f32), autocast_.has_value());
  const distributed::SpatialGroupGuard spatial(spatial_group_);
  const Restore recomputing(recomputing_, true);
  const GeneratorState now = default_generator().state();
  default_generator().set_state(random_);
  try {
    found_.clear();
    run(inputs);
  } catch (...) {
    default_generator().set_state(now);
    throw;
  }
  default_generator().set_state(now);
  check(next_ == saved_.size(), "recompute", "the function's operations saved ", saved_.size(),
        " tensors when it was first called, and now ", next_);
  for (auto& [entry, tensor] : found_) entry->found = std::move(tensor);
  found_.clear();
}

const Tensor& CheckpointedCall::get(Saved::Recomputed& entry) {
  const std::lock_guard lock(mutex_);
  if (!entry.found.defined()) again();
  return entry.found();
}

void CheckpointedCall::find(size_t number, const Tensor& tensor) {
  const auto entry = number < saved_.size() ? saved_[number].lock() : nullptr;
  if (!entry) return;
  const Saved::Recomputed& first = *entry;
  check(tensor.shape() == first.shape && tensor.strides() == first.strides && tensor.dtype() == first.options.dtype &&
            tensor.device() == first.options.device,
        "recompute", "the function's operations saved a tensor ", first.shape, ' ', first.options.dtype, " on ",
        first.options.device, " with strides ", first.strides, " when it was first called, and now ", describe(tensor),
        " with strides ", tensor.strides());
  Tensor kept = tensor.detach();
  if (first.grad_fn) {
    AutogradData& data = data_of(kept);
    data.requires_grad = true;
    data.grad_fn = first.grad_fn;
    data.output = first.output;
  }
  const Restore outside(current_, static_cast<CheckpointedCall*>(nullptr));  // kept as it is
  found_.emplace_back(entry, Saved(kept));
}

std::shared_ptr<Saved::Recomputed> CheckpointedCall::note(const Tensor& tensor) {
  CheckpointedCall* call = current_;
  if (!call || !grad_enabled()) return nullptr;
  const size_t number = call->next_++;
  if (call->recomputing_) {
    call->find(number, tensor);
    return nullptr;
  }
  const AutogradData* data = find_data(tensor);
  auto entry = std::make_shared<Saved::Recomputed>(Saved::Recomputed{call->shared_from_this(),
                                                                     data ? data->grad_fn : nullptr,
                                                                     data ? data->output : 0,
                                                                     tensor.shape(),
                                                                     tensor.strides(),
                                                                     tensor.options(),
                                                                     {}});
  call->saved_.push_back(entry);
  return entry;
}

}  // namespace

Saved::Saved(const Tensor& tensor) {
  if (!tensor.defined()) return;
  // A leaf that requires grad is kept anyway, and is itself what its gradient goes to.
  if (!tensor.requires_grad() || !tensor.is_leaf()) recomputed_ = CheckpointedCall::note(tensor);
  if (recomputed_) return;
  tensor_ = tensor;
  version_ = tensor.storage()->version();
}

const Tensor& Saved::operator()() const {
  if (recomputed_) return recomputed_->call->get(*recomputed_);
  if (tensor_.defined()) check_version(tensor_, version_);
  return tensor_;
}

bool autograd::recomputing() { return CheckpointedCall::recomputing(); }

Tensors autograd::recompute(std::function<Tensors(const Tensors&)> function, const Tensors& inputs) {
  check(static_cast<bool>(function), "recompute", "the function is empty");
  if (!grad_enabled()) return function(inputs);
  return std::make_shared<CheckpointedCall>(std::move(function), inputs)->first(inputs);
}

autograd::SavedOutput::SavedOutput(const Tensor& output)
    : detached_(output.detach()), node_(output.grad_fn()), output_(data_of(output).output) {}

Tensor autograd::SavedOutput::operator()() const {
  Tensor tensor = detached_().detach();
  if (auto node = node_.lock(); node && grad_enabled()) {
    AutogradData& data = data_of(tensor);
    data.requires_grad = true;
    data.grad_fn = std::move(node);
    data.output = output_;
  }
  return tensor;
}

void autograd::record(const char* name, const Tensors& outputs, const Tensors& inputs, Backward backward) {
  if (!needs_grad(inputs)) return;
  std::vector<Edge> edges;
  for (const Tensor& input : inputs) edges.push_back(edge_to(input));
  auto node = Node::make(name);  // after the accumulators of its inputs
  if (profiler::active()) node->module = profiler::place().module;
  node->edges = std::move(edges);
  for (const Tensor& output : outputs) {
    for (const Tensor& input : inputs)
      check(!output.is_same(input), name, "an output is one of the inputs; return a view or a copy");
    if (is_floating(output.dtype())) {
      AutogradData& data = data_of(output);
      data.requires_grad = true;
      data.grad_fn = node;
      data.output = node->outputs.size();
    }
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
    check(!output.requires_grad(), name, "an output was made outside of forward; return a view or a copy");
  }
  autograd::record(name, outputs, inputs, std::move(backward));
  return outputs;
}

bool Tensor::requires_grad() const {
  const AutogradData* data = find_data(*this);
  return data && data->requires_grad;
}

const Tensor& Tensor::requires_grad_(bool value) const {
  check(is_leaf() || value, "requires_grad_", "the result of an operation requires grad; use detach()");
  check(!value || is_floating(dtype()), "requires_grad_", "only floating tensors have gradients, this one is ",
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
  return data ? data->grad_fn : nullptr;
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
  return add_hook(data.grad_fn ? data.grad_fn->outputs[data.output].hooks : data.hooks, std::move(hook));
}

HookHandle Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> hook) const {
  constexpr const char* kOp = "register_post_accumulate_grad_hook";
  check(requires_grad() && is_leaf(), kOp, "the tensor is no leaf that requires grad");
  check(static_cast<bool>(hook), kOp, "the hook is empty");
  return add_hook(data_of(*this).post_hooks,
                  [hook = std::move(hook)](const Tensor& leaf) { return hook(leaf), Tensor(); });
}

void Tensor::retain_grad() const {
  check(requires_grad(), "retain_grad", "the tensor does not require grad");
  AutogradData& data = data_of(*this);
  if (data.grad_fn) data.grad_fn->outputs[data.output].retained = body_;
}

void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  autograd::backward({*this}, {gradient}, retain_graph, create_graph);
}

}  // namespace voxgrad
