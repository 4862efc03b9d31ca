// Base classes of all optimizers. optimizers.h defines the optimizers. ops/optim.h declares the functions that compute
// their steps.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../../core/capture.h"
#include "../../core/io/safetensors.h"
#include "../../ops/optim.h"
#include "../fields.h"

namespace voxgrad::nn {
class ZeroRedundancy;
}

namespace voxgrad::optim {

/// Parameters that share their options.
template <class Options>
struct ParamGroup {
  Tensors params;
  Options options{};
};

/// Describes a tensor that an optimizer may keep for each parameter.
struct BufferSpec {
  std::string name;    ///< the name in PyTorch's state_dict
  bool used;           ///< whether the options need the buffer
  double initial = 0;  ///< value of all elements before the first step
  friend bool operator==(const BufferSpec&, const BufferSpec&) = default;
};
/// Maximum number of buffers per parameter.
inline constexpr size_t kMaxBuffers = 3;
/// The tensors that an optimizer keeps for each parameter, in a fixed order; at most kMaxBuffers.
using BufferSpecs = std::vector<BufferSpec>;

/// Arguments that a GradScaler passes to Optimizer::step: scalar tensors on the device of the parameters.
struct GradScaling {
  Tensor scale{};      ///< f32; the step divides the gradients by `scale`; undefined: no division
  Tensor found_inf{};  ///< i64; if not 0, the device skips the step and does not count it; undefined: 0
};

/// One step of parameters that are in the same group and have taken the same number of steps.
struct Update {
  size_t group = 0;
  int64_t step = 0;                            ///< number of this step, from 1
  Tensors params;                              ///< the parameters that the step updates
  Tensors grads;                               ///< the gradients of `params`, in the same order
  std::vector<size_t> slots{};                 ///< indices of `params` among all parameters of the optimizer
  std::array<Tensors, kMaxBuffers> buffers{};  ///< in the order of the specs; empty if not used
  GradScaling given{};                         ///< arguments of Optimizer::step
  Tensor skipped{};                   ///< number of earlier steps that the device skipped, an i64 scalar; undefined: 0
  std::vector<const void*> memory{};  ///< addresses of the parameters and of their state when the step was captured

  /// Updates the parameters and the buffers.
  void run(const AnyStep& options) const {
    const auto if_defined = [](const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; };
    optimizer_step(params, grads, {buffers[0], buffers[1], buffers[2]}, options,
                   {if_defined(given.scale), if_defined(given.found_inf), if_defined(skipped)});
  }
};

/// Base class of optimizers, which update parameters from their gradients. The parameters must be floating-point
/// leaves that are contiguous or channels_last. No parameter may appear twice, and no two parameters may share memory.
/// The state of a parameter has the memory format and the dtype of the parameter. For bf16 and f16 parameters, the
/// state is f32 and steps are computed in f32. While a thread uses an optimizer, no other thread may use the optimizer
/// or its parameters.
class Optimizer : public nn::Stateful, NonCopyable {
 public:
  /// Updates every parameter that has a gradient. Other parameters and their state remain unchanged. Throws Error,
  /// before anything is changed, if the shape, dtype or device of a gradient differs from that of the parameter. Also
  /// throws if only the optimizer still holds a handle of a parameter. This happens if the module was destroyed, or if
  /// a new tensor was assigned to the member of the module. The check cannot detect such a parameter if the program
  /// holds one more handle of it, for example in a list.
  ///
  /// During the capture of a CUDA graph (cuda/cuda.h), the step is recorded, and each replay performs one step. A
  /// GradScaler (nn/optim/grad_scaler.h) passes `scaling`; the host does not wait for the values.
  void step(const GradScaling& scaling = {});
  /// Returns the gradients of all parameters that have a gradient.
  Tensors gradients() const {
    Tensors found;
    for (const Slot& slot : slots_)
      if (const Tensor grad = slot.param.grad(); grad.defined()) found.push_back(grad);
    return found;
  }
  /// Drops the gradients of all parameters.
  void zero_grad() const {
    for (const Slot& slot : slots_) slot.param.set_grad({});
  }

  size_t num_groups() const { return group_sizes_.size(); }
  /// Returns the learning rate of a group.
  virtual double lr(size_t group = 0) const = 0;
  /// Sets the learning rate of one group, or of all groups. Throws Error unless `lr` is finite and not negative.
  void set_lr(size_t group, double lr) {
    change_option(group, {"lr"}, lr);
    initial_lr_[group].reset();
  }
  void set_lr(double lr) {
    for (size_t group = 0; group < num_groups(); ++group) set_lr(group, lr);
  }
  /// Sets the momentum of a group, or beta1 of an optimizer with betas. Throws Error if the optimizer has neither
  /// option, if the value is invalid, or if the change would add or remove momentum after the first step.
  void set_momentum(size_t group, double momentum) { change_option(group, {"momentum", "beta1"}, momentum); }

  /// Returns the state with the names "state.<parameter>.<buffer>" and "state.<parameter>.step",
  /// "param_groups.<group>.<option>", "param_groups.<group>.params" (the indices of its parameters), and
  /// "class.<name>". The buffers share memory with the optimizer.
  ///
  /// load_state_dict replaces the options and copies the buffers. load_state_dict throws Error if the state is
  /// incomplete, contains invalid options, or comes from another class of optimizer or from other groups or shapes.
  TensorMap state_dict() const override;

 protected:
  Optimizer(const char* name, const std::vector<Tensors>& groups);

  /// Performs the step that `u` describes.
  virtual void update(const Update& u) = 0;
  /// Returns the buffers that a group may have.
  virtual BufferSpecs buffers(size_t group) const = 0;
  /// Sets the option that has one of these names. Throws if the options have none of these names, or if the value is
  /// invalid.
  virtual void change_option(size_t group, std::initializer_list<std::string_view> names, double value) = 0;
  /// Adds the options of a group to `state`.
  virtual void write_options(size_t group, TensorMap& state, const std::string& prefix) const = 0;
  /// Reads the options of a group, and sets them if `keep`. Returns the buffers that these options need. Throws if the
  /// options are invalid.
  virtual BufferSpecs read_options(size_t group, const TensorMap& state, const std::string& prefix, bool keep) = 0;

  const char* name() const { return name_; }
  /// Returns whether a parameter of the group has been updated.
  bool has_state(size_t group) const {
    return std::ranges::any_of(slots_, [&](const Slot& slot) { return slot.group == group && slot.step > 0; });
  }

 private:
  /// A parameter and its state.
  struct Slot {
    Tensor param;
    size_t group;
    int64_t step = 0;  ///< number of steps, including those that the device skipped
    std::array<Tensor, kMaxBuffers> buffers{};
    Tensor skipped{};  ///< see Update::skipped; shared by parameters that have taken all steps together
  };
  friend class StepSchedule;
  friend class nn::ZeroRedundancy;

  /// Returns whether this process updates the parameter.
  bool owns(size_t slot) const { return owned_.empty() || owned_[slot]; }
  void check_gradients() const;
  /// Returns the addresses of the parameters and of their state. A captured step uses these addresses in its replays.
  std::vector<const void*> memory_of(const Update& u) const;
  /// Adds u.given.found_inf to u.skipped. If parameters outside `u` share the counter, first creates a separate counter
  /// for the parameters of `u`.
  void count_skip(Update& u);
  /// Performs the updates and counts the steps of their parameters. In a replay, the number of a step follows from the
  /// current count, not from the count at the capture.
  void perform(std::vector<Update>& updates);
  void read_state(const TensorMap& state, bool keep) override;

  const char* name_;
  std::vector<size_t> group_sizes_;
  std::vector<Slot> slots_;
  std::vector<bool> owned_;                        // by slot: whether this process updates the parameter; empty: all
  std::function<void()> after_step_;               // set by nn::ZeroRedundancy
  bool consolidated_ = true;                       // whether this process has the state of all slots
  std::vector<std::optional<double>> initial_lr_;  // by group: the initial rate of schedules; reset by set_lr()
  // Captured steps hold a weak pointer to self_, which expires with the optimizer.
  std::shared_ptr<Optimizer*> self_ = std::make_shared<Optimizer*>(this);
};

/// An optimizer whose groups have options of type Options. Options has the members lr, kName (the class name), and four
/// functions: validate() throws Error for invalid values, fields() returns the options by name, buffers() returns the
/// buffers that the options need, and step() updates the parameters of a group.
template <class Options>
class OptimizerOf : public Optimizer {
 public:
  using Group = ParamGroup<Options>;

  /// Creates an optimizer with one group, or with the given groups. Throws Error for an empty group, for a tensor that
  /// is not a floating-point leaf, for parameters that appear twice or share memory, and for invalid options.
  explicit OptimizerOf(const Tensors& params, const Options& options = {})
      : OptimizerOf(std::vector<Group>{{params, options}}) {}
  OptimizerOf(const Tensors& params, double lr) : OptimizerOf(params, Options{.lr = lr}) {}
  explicit OptimizerOf(const std::vector<Group>& groups) : Optimizer(Options::kName, params_of(groups)) {
    for (const Group& group : groups) {
      group.options.validate();
      options_.push_back(group.options);
    }
  }

  double lr(size_t group = 0) const override { return options(group).lr; }
  /// Returns the options of a group. Throws Error if group >= num_groups().
  const Options& options(size_t group = 0) const {
    check(group < options_.size(), name(), "parameter group ", group, " is out of range: num_groups() is ",
          options_.size());
    return options_[group];
  }
  /// Sets the options of a group. Throws Error for invalid options. After the first step, also throws for options that
  /// need other buffers, so momentum, amsgrad and centered can no longer be switched on or off.
  void set_options(size_t group, const Options& changed) {
    const BufferSpecs before = options(group).buffers();
    changed.validate();
    check(before == changed.buffers() || !has_state(group), name(),
          "options that change which buffers are kept cannot be set after the first step");
    options_[group] = changed;
  }

 protected:
  BufferSpecs buffers(size_t group) const override { return options_[group].buffers(); }
  void update(const Update& u) override { options_[u.group].step(u); }
  void change_option(size_t group, std::initializer_list<std::string_view> names, double value) override {
    Options changed = options(group);
    check(nn::set_field(changed.fields(), names, value), name(), "has no ", *names.begin());
    set_options(group, changed);
  }
  void write_options(size_t group, TensorMap& state, const std::string& prefix) const override {
    Options copy = options_[group];
    nn::write_fields(state, prefix, copy.fields());
  }
  BufferSpecs read_options(size_t group, const TensorMap& state, const std::string& prefix, bool keep) override {
    Options read = options_[group];
    nn::read_fields(state, prefix, read.fields(), name());
    read.validate();
    if (keep) options_[group] = read;
    return read.buffers();
  }

 private:
  static std::vector<Tensors> params_of(const std::vector<Group>& groups) {
    std::vector<Tensors> lists;
    for (const Group& group : groups) lists.push_back(group.params);
    return lists;
  }

  std::vector<Options> options_;
};

/// Converts the state of `param` in place to the memory format of `param`, which may have changed. Throws if the
/// conversion would be captured.
void match_memory_format(const char* op, const Tensor& state, const Tensor& param);

/// An option and its range.
struct BoundedOption {
  BoundedOption(const char* option, auto number, double lowest = 0, double highest = std::numeric_limits<double>::max())
      : name(option), value(static_cast<double>(number)), low(lowest), high(highest) {}
  const char* name;
  double value;
  double low;   ///< lowest valid value
  double high;  ///< highest valid value
};
/// Throws "<op>: <option> must be finite and at least <low>, got <value>", or "must lie in [<low>, <high>]", for the
/// first option outside its range.
void check_options(const char* op, std::initializer_list<BoundedOption> options);
/// Throws unless both betas lie in [0, 1).
void check_betas(const char* optimizer, const std::array<double, 2>& betas);

}  // namespace voxgrad::optim
