// Reverse-mode differentiation: the recorded graph, and the engine that runs it backward.
//
// Threads: several may record on the same leaves and run backward() and grad() at the same time, each on a graph of its
// own, on one stream of a GPU; their gradients of a leaf add up, in the order in which they arrive. Graphs that share
// nodes may be run at the same time only with retain_graph = true. Hooks are registered and removed, and
// requires_grad_() called, while no other thread uses the tensor.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "profiler.h"
#include "scoped_value.h"
#include "tensor.h"

namespace voxgrad {

/// The gradients of a node's inputs from those of its outputs. Undefined tensors stand for zero.
using Backward = std::function<Tensors(const Tensors& grads)>;
/// In the order of registration; a removed hook is an empty function.
using Hooks = std::vector<std::shared_ptr<Hook>>;

/// Where a gradient goes: output number `output` of `node`.
struct Edge {
  std::shared_ptr<Node> node;
  size_t output = 0;
};

/// One recorded operation, or the place where a leaf's gradient is accumulated.
class Node {
 public:
  struct Output {
    Shape shape;
    DType dtype;
    Device device;
    Hooks hooks{};
    std::weak_ptr<TensorBody> retained{};  ///< keeps the gradient too: retain_grad()
  };

  /// Nodes are made here: they are deleted one after the other, never recursively.
  static std::shared_ptr<Node> make(std::string name);

  std::string name;
  uint64_t sequence = 0;    ///< every node comes after those that made its inputs, leaves' accumulators among them
  std::vector<Edge> edges;  ///< one for each input; an empty one needs no gradient
  std::vector<Output> outputs;
  Backward backward;                 ///< empty once the graph was freed, and for a leaf
  std::shared_ptr<TensorBody> leaf;  ///< set for accumulators only
  profiler::Name module = nullptr;   ///< that recorded it, known while a profiler is recording

 private:
  explicit Node(std::string node_name) : name(std::move(node_name)) {}
  static void destroy(Node* node) noexcept;

  Node* next_dead_ = nullptr;
};

/// The autograd side of a tensor; absent until needed.
struct AutogradData {
  bool requires_grad = false;
  std::shared_ptr<Node> grad_fn;
  size_t output = 0;  ///< which output of grad_fn
  Hooks hooks;        ///< leaves: a non-leaf's hooks live in its grad_fn
  Hooks post_hooks;   ///< leaves: called with the tensor, once its gradient was added to; what they return is not used

  std::mutex mutex;  ///< of what backward passes of several threads change:
  Tensor grad;
  std::weak_ptr<Node> accumulator;  ///< leaves: where edges to this tensor end

  /// For autocast: a leaf's values in another dtype, with the state of the leaf that they were made of.
  struct Converted {
    Tensor values;
    std::weak_ptr<Storage> source;
    uint64_t version = 0;
    uint64_t capture = 0;  ///< the id of the capture that recorded the conversion; 0: done at once
  } converted;
};

struct TensorBody {
  std::shared_ptr<Storage> storage;
  int64_t offset = 0;
  Shape shape;
  Strides strides;
  DType dtype = DType::f32;
  std::unique_ptr<AutogradData> autograd;
};

/// Whether operations are being recorded on this thread.
bool grad_enabled();

/// Switches recording on or off on this thread while it lives.
class [[nodiscard]] GradModeGuard {
 public:
  [[nodiscard]] explicit GradModeGuard(bool enabled);

 private:
  ScopedValue<bool> enabled_;
};

/// Nothing is recorded while it lives: `NoGradGuard no_grad;`
class [[nodiscard]] NoGradGuard : public GradModeGuard {
 public:
  [[nodiscard]] NoGradGuard() : GradModeGuard(false) {}
};

/// True if an operation on these inputs has to be recorded.
bool needs_grad(const Tensors& inputs);

/// Throws unless `target` may be written in place: nothing would have to be recorded (for `source`, which is written
/// there, too), and no two of its elements share memory.
void check_in_place(const char* op, const Tensor& target, const Tensor& source = {});

/// A tensor kept for the backward pass, or, within autograd::recompute, computed again for it. Reading it throws if it
/// was written to since.
class Saved {
 public:
  Saved() = default;
  Saved(const Tensor& tensor);
  /// The tensor as it was saved. Throws Error after an in-place write.
  const Tensor& operator()() const;
  bool defined() const { return tensor_.defined() || recomputed_; }

  struct Recomputed;

 private:
  Tensor tensor_;
  uint64_t version_ = 0;
  std::shared_ptr<Recomputed> recomputed_;
};

namespace autograd {

/// Where the gradient of `tensor` goes: the operation that made it, the accumulator of a leaf, or nowhere.
Edge edge_to(const Tensor& tensor);

/// Attaches `backward` to outputs computed from `inputs`. Does nothing if none of the inputs needs a
/// gradient or recording is off. The outputs must be fresh tensors (not inputs).
void record(const char* name, const Tensors& outputs, const Tensors& inputs, Backward backward);

/// For a backward pass that needs its own output (exp, sigmoid): the output without a cycle through the
/// graph, and as part of the graph again when read.
class SavedOutput {
 public:
  explicit SavedOutput(const Tensor& output);
  Tensor operator()() const;

 private:
  Saved detached_;
  std::weak_ptr<Node> node_;
  size_t output_;
};

/// Throws unless the backward pass that is running is an ordinary one: for gradients made of fused kernels
/// that cannot be differentiated again.
void once_differentiable(const char* op);

/// function(inputs), recorded as usual, but of what its operations save for the backward pass nothing is kept: the
/// backward pass calls `function` again, once, with the same inputs, random numbers of the default generator and
/// autocast, so that the bits are the same. What `function` refers to must live until then, and not be written to.
/// Layers that change their state in training (BatchNorm, SpectralNorm) do so in the first call only. Gradients of any
/// order; but none may be taken within `function`.
/// Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174. The backward pass throws Error if an
/// input was written to since, or if the second call saves other tensors by number, shape, strides or dtype.
Tensors recompute(std::function<Tensors(const Tensors& inputs)> function, const Tensors& inputs);
/// Whether this is the second call, on this thread: state that the first call changed is to stay.
bool recomputing();

/// The name of the operation whose gradient is being computed on this thread; empty if there is none.
std::string running_node();

/// d(sum of outputs * grad_outputs) / d(inputs), leaving all grad() alone. `grad_outputs` may be empty
/// (ones for one-element outputs). Inputs that outputs do not depend on: undefined tensors if
/// `allow_unused`, else an error.
Tensors grad(const Tensors& outputs, const Tensors& inputs, const Tensors& grad_outputs = {}, bool retain_graph = false,
             bool create_graph = false, bool allow_unused = false);

/// For hooks: calls `callback` at the end of the backward pass that is running on this thread, when all gradients have
/// arrived, in the order of the calls. None is called if the pass throws. Throws if no backward pass is running.
void queue_callback(std::function<void()> callback);

/// For hooks: the leaves that the backward pass which is running on this thread leads to. Throws if none is running.
std::unordered_set<const TensorBody*> reached_leaves();

/// backward() from several tensors at once.
void backward(const Tensors& outputs, const Tensors& grad_outputs = {}, bool retain_graph = false,
              bool create_graph = false);

}  // namespace autograd

using autograd::grad;

/// Records a single output. `backward` is called with (grad) or with (grad, output) and returns a gradient
/// for each input. Returns `output`.
template <class F>
Tensor record(const char* name, Tensor output, const Tensors& inputs, F backward) {
  if (!needs_grad(inputs)) return output;
  if constexpr (std::is_invocable_v<F, const Tensor&, const Tensor&>) {
    // The node has to exist before its output can be saved: fill the slot afterwards.
    auto saved = std::make_shared<std::unique_ptr<autograd::SavedOutput>>();
    autograd::record(name, {output}, inputs, [backward = std::move(backward), saved](const Tensors& grads) {
      return Tensors(backward(grads[0], (**saved)()));
    });
    *saved = std::make_unique<autograd::SavedOutput>(output);
  } else {
    autograd::record(name, {output}, inputs,
                     [backward = std::move(backward)](const Tensors& grads) { return Tensors(backward(grads[0])); });
  }
  return output;
}

/// A differentiable function of the user's own: `forward` runs unrecorded, `backward` gives a gradient for
/// each input and is itself differentiable if it is made of differentiable operations. Tensors that
/// backward needs are captured as `Saved`.
Tensors custom_function(const char* name, const Tensors& inputs, const std::function<Tensors(const Tensors&)>& forward,
                        Backward backward);

}  // namespace voxgrad
