// Optimizers: what all of them share. The steps themselves are in ops/optim.h.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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

/// A tensor that an optimizer may keep for each parameter, under PyTorch's name.
struct BufferSpec {
  std::string name;
  bool used;
  bool squares = false;  ///< an average of squares, never negative
  double initial = 0;    ///< what it holds before the first step
  friend bool operator==(const BufferSpec&, const BufferSpec&) = default;
};
inline constexpr size_t kMaxBuffers = 3;
using BufferSpecs = std::vector<BufferSpec>;

/// What a GradScaler tells an optimizer's step: tensors of one element on the parameters' device.
struct GradScaling {
  Tensor scale{};      ///< f32: gradients are this many times too large; undefined: they are as they should be
  Tensor found_inf{};  ///< i64: where it is not 0, the step is not taken, and not counted; undefined: as 0
};

/// The parameters of a group that are at the same step.
struct Update {
  int64_t step = 0;  ///< 1 for the first, whose buffers are zero
  Tensors params, grads;
  std::vector<size_t> slots{};                 ///< the parameters' numbers
  std::array<Tensors, kMaxBuffers> buffers{};  ///< in the order of the specs; empty where not used
  GradScaling given{};
  Tensor skipped{};  ///< how many of `step` steps the device did not take; undefined: none

  StepScaling scaling() const {
    const auto if_defined = [](const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; };
    return {if_defined(given.scale), if_defined(given.found_inf), if_defined(skipped)};
  }
};

/// Changes parameters by their gradients. The parameters must be contiguous or channels_last floating leaves,
/// each given once, that share no memory; their state has their memory format and dtype, that of halves is f32, as is
/// the arithmetic. For one thread at a time, while no other uses the parameters.
class Optimizer : public nn::Stateful {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step for every parameter that has a gradient; the others, their state too, are left as they are.
  /// Throws, before anything is changed, for a gradient whose shape, dtype or device is not the parameter's, and for a
  /// parameter of which nobody but the optimizer holds a handle: its module is gone, or its member was assigned to
  /// (another handle, in a list of parameters for instance, hides that).
  /// Within the capture of a CUDA graph (cuda/cuda.h) the step is taken by each replay. `scaling` comes from a
  /// GradScaler (nn/optim/grad_scaler.h); nothing waits for it.
  void step(const GradScaling& scaling = {});
  /// The gradients that there are.
  Tensors gradients() const;
  /// Drops the gradients of all parameters.
  void zero_grad() const;

  size_t num_groups() const { return group_sizes_.size(); }
  virtual double lr(size_t group = 0) const = 0;
  /// Throws unless `lr` is finite and not negative. Without `group`: for all groups.
  void set_lr(size_t group, double lr);
  void set_lr(double lr);
  /// Sets momentum, or beta1 where there are betas. Throws where there is neither, and as set_options does.
  void set_momentum(size_t group, double momentum) { change_option(group, {"momentum", "beta1"}, momentum); }

  /// "state.<parameter>.<buffer>" and "state.<parameter>.step", "param_groups.<group>.<option>",
  /// "param_groups.<group>.params" (the numbers of its parameters), and "class.<name>". Buffers are handles.
  /// load_state_dict takes over the options and copies of the buffers. It throws if the state comes from another kind
  /// of optimizer, from other groups or shapes, or is not complete; if an option is one that the constructor refuses, a
  /// step count lies outside [1, 2^62], a buffer holds a value that is not finite, or one of squares (exp_avg_sq,
  /// max_exp_avg_sq, square_avg) a negative one.
  TensorMap state_dict() const override;

 protected:
  Optimizer(const char* name, const std::vector<Tensors>& groups);

  virtual void update(size_t group, const Update& u) = 0;
  virtual BufferSpecs buffers(size_t group) const = 0;
  /// Sets the option that has one of these names.
  virtual void change_option(size_t group, std::initializer_list<std::string_view> names, double value) = 0;
  virtual void write_options(size_t group, TensorMap& state, const std::string& prefix) const = 0;
  /// Reads and checks a group's options; `buffers` receives what they need. Keeps them only if `keep`.
  virtual void read_options(size_t group, const TensorMap& state, const std::string& prefix, BufferSpecs& buffers,
                            bool keep) = 0;

  const char* name() const { return name_; }
  /// Whether a parameter of the group has been updated.
  bool has_state(size_t group) const;

 private:
  struct Slot {
    Tensor param;
    size_t group;
    int64_t step = 0;  ///< those counted, the skipped ones too
    std::array<Tensor, kMaxBuffers> buffers{};
    Tensor skipped{};  ///< Update's; parameters that always stepped together share it
  };
  friend class StepSchedule;
  friend class nn::ZeroRedundancy;

  bool owns(size_t slot) const { return owned_.empty() || owned_[slot]; }
  void check_gradients() const;
  std::vector<const void*> memory_of(const Update& u) const;
  /// Makes u.skipped a counter of just these parameters, and counts this step in it.
  void count_skip(Update& u);
  struct Captured;
  void replay(std::vector<Captured>& updates);
  void read_state(const TensorMap& state, bool keep) override;

  const char* name_;
  std::vector<size_t> group_sizes_;
  std::vector<Slot> slots_;
  std::vector<bool> owned_;           // of the slots, which this process steps and has the state of; empty: all
  std::function<void()> after_step_;  // of nn::ZeroRedundancy
  bool consolidated_ = true;          // the state of all slots is here
  std::vector<std::optional<double>> initial_lr_;                          // that schedules begin with, until set_lr()
  std::shared_ptr<Optimizer*> self_ = std::make_shared<Optimizer*>(this);  // captured steps see by it that it is gone
};

/// An optimizer whose groups have options of one type. Options has members lr, kName, validate(), which throws Error
/// for values out of range, fields(), buffers(), and step(), which updates the parameters of a group.
template <class Options>
class OptimizerOf : public Optimizer {
 public:
  using Group = ParamGroup<Options>;

  /// Throws Error for an empty list, a tensor that is no parameter or appears twice, and for options out of range.
  explicit OptimizerOf(const Tensors& params, const Options& given = {})
      : OptimizerOf(std::vector<Group>{{params, given}}) {}
  OptimizerOf(const Tensors& params, double lr) : OptimizerOf(params, Options{.lr = lr}) {}
  explicit OptimizerOf(const std::vector<Group>& groups) : Optimizer(Options::kName, params_of(groups)) {
    for (const Group& group : groups) {
      group.options.validate();
      options_.push_back(group.options);
    }
  }

  double lr(size_t group = 0) const override { return options(group).lr; }
  /// Throws if there is no such group.
  const Options& options(size_t group = 0) const {
    check(group < options_.size(), name(), "there is no parameter group ", group, " among ", options_.size());
    return options_[group];
  }
  /// Throws for options out of range, and for those that need other buffers than the steps so far have made
  /// (switching momentum, amsgrad or centered on or off).
  void set_options(size_t group, const Options& changed) {
    const BufferSpecs before = options(group).buffers();
    changed.validate();
    check(before == changed.buffers() || !has_state(group), name(),
          "options that change which buffers are kept cannot be set after the first step");
    options_[group] = changed;
  }

 protected:
  BufferSpecs buffers(size_t group) const override { return options_[group].buffers(); }
  void update(size_t group, const Update& u) override { options_[group].step(u); }
  void change_option(size_t group, std::initializer_list<std::string_view> names, double value) override {
    Options changed = options(group);
    check(nn::set_field(changed.fields(), names, value), name(), "has no ", *names.begin());
    set_options(group, changed);
  }
  void write_options(size_t group, TensorMap& state, const std::string& prefix) const override {
    Options copy = options_[group];
    nn::write_fields(state, prefix, copy.fields());
  }
  void read_options(size_t group, const TensorMap& state, const std::string& prefix, BufferSpecs& specs,
                    bool keep) override {
    Options read = options_[group];
    nn::read_fields(state, prefix, read.fields(), name());
    try {
      read.validate();
    } catch (const Error& error) {  // "<name>: <option> must ..."
      fail(name(), prefix, std::string_view(error.what()).substr(std::string_view(Options::kName).size() + 2));
    }
    specs = read.buffers();
    if (keep) options_[group] = read;
  }

 private:
  static std::vector<Tensors> params_of(const std::vector<Group>& groups) {
    std::vector<Tensors> lists;
    for (const Group& group : groups) lists.push_back(group.params);
    return lists;
  }

  std::vector<Options> options_;
};

/// Puts the state of `param` into its memory format, which may have changed since the state was made: in place. Throws
/// if that would be captured.
void match_memory_format(const char* op, const Tensor& state, const Tensor& param);

/// Throws "<op>: <name> must lie in [<least>, 2^62], got <count>": nobody counts from there to an overflow.
void check_count(const char* op, const std::string& name, int64_t count, int64_t least);

/// Throws "<optimizer>: <option> must be finite and at least 0, got -1" for the first of `options` that is not.
void check_not_negative(const char* optimizer, std::initializer_list<std::pair<const char*, double>> options);
/// Throws unless both lie in [0, 1).
void check_betas(const char* optimizer, const std::array<double, 2>& betas);

}  // namespace voxgrad::optim
