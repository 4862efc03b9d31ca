// Reverse-mode differentiation: the recorded graph, and the engine that runs it backward.
//
// Thread safety: several threads may record operations on the same leaves and run backward() and grad() at the same
// time if each thread uses its own graph. On a GPU, these threads must use the same stream. If several passes compute a
// gradient of the same leaf, the gradients are added in the order of arrival. Backward passes through graphs that share
// nodes may run at the same time only with retain_graph = true. Register and remove hooks, and call requires_grad_(),
// only while no other thread uses the tensor.
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

/// Computes the gradients of a node's inputs from the gradients of its outputs. An undefined tensor stands for zero.
using Backward = std::function<Tensors(const Tensors& grads)>;
/// Hooks in the order of registration. A removed hook is an empty function.
using Hooks = std::vector<std::shared_ptr<Hook>>;

/// The destination of a gradient: output number `output` of `node`.
struct Edge {
  std::shared_ptr<Node> node;
  size_t output = 0;
};

/// A recorded operation, or the accumulator of a leaf's gradient.
class Node {
 public:
  struct Output {
    Shape shape;
    DType dtype;
    Device device;
    Hooks hooks{};
    std::weak_ptr<TensorBody> retained{};  ///< the tensor, if retain_grad() was called on it
  };

  /// Creates a node. Its deleter frees long graphs iteratively, so that they cannot overflow the stack.
  static std::shared_ptr<Node> make(std::string name);

  std::string name;
  /// The sequence number. It is larger than those of all nodes that produced an input, including accumulators.
  uint64_t sequence = 0;
  std::vector<Edge> edges;  ///< one per input; an empty edge means that the input needs no gradient
  std::vector<Output> outputs;
  Backward backward;                 ///< empty for accumulators, and after the graph was freed
  std::shared_ptr<TensorBody> leaf;  ///< the leaf, if this node is an accumulator; otherwise null
  profiler::Name module{};           ///< the module that recorded the node; set only while a profiler records

 private:
  explicit Node(std::string node_name) : name(std::move(node_name)) {}
  static void destroy(Node* node) noexcept;

  Node* next_dead_ = nullptr;
};

/// The autograd data of a tensor. Allocated when first needed.
struct AutogradData {
  bool requires_grad = false;
  Edge source;  ///< the recorded operation that made this tensor; empty for leaves
  Hooks hooks;  ///< for leaves; the hooks of a non-leaf are stored in its source
  Hooks
      post_hooks;  ///< for leaves; called with the tensor after its gradient was accumulated; return values are ignored

  std::mutex mutex;  ///< guards the members below, which concurrent backward passes modify
  Tensor grad;
  std::weak_ptr<Node> accumulator;  ///< for leaves; the node to which edges of this tensor lead

  /// The copy of a leaf that autocast converted to another dtype, and the version of the leaf at that time.
  struct Converted {
    Tensor values;
    std::weak_ptr<Storage> source;
    uint64_t version = 0;
    uint64_t capture = 0;  ///< the id of the CUDA graph that recorded the conversion, or 0
  } converted;
};

/// The data of a tensor. Tensor objects that are copies of each other share one body.
struct TensorBody {
  std::shared_ptr<Storage> storage;
  int64_t offset = 0;
  Shape shape;
  Strides strides;
  DType dtype = DType::f32;
  std::unique_ptr<AutogradData> autograd{};
};

/// Returns whether operations on this thread are recorded.
bool grad_enabled();

/// Enables or disables recording on this thread during the lifetime of the guard.
class [[nodiscard]] GradModeGuard : ScopedValue<bool> {
 public:
  [[nodiscard]] explicit GradModeGuard(bool enabled);
};

/// Disables recording on this thread during the lifetime of the guard: `NoGradGuard no_grad;`
class [[nodiscard]] NoGradGuard : public GradModeGuard {
 public:
  [[nodiscard]] NoGradGuard() : GradModeGuard(false) {}
};

/// Returns whether an operation on these inputs must be recorded.
bool needs_grad(const Tensors& inputs);

/// Throws if `source` must not be written to `target` in place: if autograd would have to record the write, or if two
/// elements of `target` share memory.
void check_in_place(const char* op, const Tensor& target, const Tensor& source = {});

/// A tensor that is saved for the backward pass. Within autograd::recompute, only its description is kept, and the
/// backward pass recomputes the tensor.
class Saved {
 public:
  Saved() = default;
  Saved(const Tensor& tensor);
  /// Returns the saved tensor. Throws Error if the tensor was written in place after it was saved.
  const Tensor& operator()() const;
  bool defined() const { return tensor_.defined() || recomputed_; }

  struct Recomputed;

 private:
  Tensor tensor_;
  uint64_t version_ = 0;
  std::shared_ptr<Recomputed> recomputed_;
};

namespace autograd {

/// Returns the destination of the gradient of `tensor`: the operation that produced the tensor, the accumulator of a
/// leaf, or an empty edge if the tensor does not require grad.
Edge edge_to(const Tensor& tensor);

/// Records an operation with these outputs and inputs. Does nothing if none of the inputs requires grad or if recording
/// is off. Throws if an output is also an input.
void record(const char* name, const Tensors& outputs, const Tensors& inputs, Backward backward);

/// A saved output of an operation whose backward function needs the output (exp, sigmoid). The output is stored without
/// a reference to its node, because the node holds the saved output, and the two would keep each other alive.
/// operator() returns the output attached to its node.
class SavedOutput {
 public:
  explicit SavedOutput(const Tensor& output);
  Tensor operator()() const;

 private:
  Saved detached_;
  std::weak_ptr<Node> node_;
  size_t output_;
};

/// Throws if the running backward pass records a graph (create_graph = true). Called before fused kernels that compute
/// gradients, because such gradients cannot be differentiated again.
void once_differentiable(const char* op);

/// Computes function(inputs) without keeping the tensors that its operations save for the backward pass, as
/// torch.utils.checkpoint does (Chen et al., arXiv:1604.06174). The backward pass calls `function` again, with the same
/// inputs, autocast dtype and random numbers of the default generator. The gradients therefore have the same bits as
/// without recompute(). The second call ends, by an exception that is not a std::exception, as soon as it has
/// recomputed the last saved tensor: a convolution at the end of `function` is not computed again. Objects that
/// `function` refers to must not be destroyed or modified before the backward pass. Layers that change their state in
/// training (BatchNorm, SpectralNorm) change their state in the first call only.
///
/// Gradients of any order are supported, but `function` itself must not compute gradients. The backward pass throws
/// Error if an input was modified after the first call. It also throws if the operations in the second call save fewer
/// tensors, or tensors of another shape, strides or dtype.
Tensors recompute(std::function<Tensors(const Tensors& inputs)> function, const Tensors& inputs);
/// Returns whether this thread is in the second call of recompute(), in which layers must not change their state.
bool recomputing();

/// Returns d(sum of outputs * grad_outputs) / d(inputs) without changing any grad(). If `grad_outputs` is empty, all
/// outputs must have one element, whose gradient is 1. Throws if the outputs do not depend on an input; with
/// `allow_unused`, returns an undefined tensor for this input instead. `voxgrad::grad` is the same function.
Tensors grad(const Tensors& outputs, const Tensors& inputs, const Tensors& grad_outputs = {}, bool retain_graph = false,
             bool create_graph = false, bool allow_unused = false);

/// Calls `callback` at the end of the backward pass that is running on this thread. Callbacks are called in the order
/// in which they were queued. Hooks use this function. If the pass throws, no callback is called. Throws if no backward
/// pass is running on this thread.
void queue_callback(std::function<void()> callback);

/// Returns the leaves that this thread's running backward pass can reach. Throws if no backward pass is running on this
/// thread.
std::unordered_set<const TensorBody*> reached_leaves();

/// Runs a backward pass from several tensors at once. See Tensor::backward.
void backward(const Tensors& outputs, const Tensors& grad_outputs = {}, bool retain_graph = false,
              bool create_graph = false);

}  // namespace autograd

using autograd::grad;

/// Records an operation with one output, and returns the output. The function `backward` takes (grad) or (grad,
/// output), and returns one gradient per input.
template <class F>
Tensor record(const char* name, Tensor output, const Tensors& inputs, F backward) {
  if (!needs_grad(inputs)) return output;
  if constexpr (std::is_invocable_v<F, const Tensor&, const Tensor&>) {
    // SavedOutput needs the node, so the output is saved after autograd::record() has created the node.
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

/// Calls a user-defined differentiable function. `forward` is not recorded. `backward` returns one gradient per input.
/// These gradients can be differentiated again if `backward` consists of differentiable operations. `backward` should
/// capture the tensors that it needs as `Saved`, which detects in-place writes.
Tensors custom_function(const char* name, const Tensors& inputs, const std::function<Tensors(const Tensors&)>& forward,
                        Backward backward);

}  // namespace voxgrad
