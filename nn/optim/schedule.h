// Learning-rate schedules, which set the learning rates of an optimizer's groups during training.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <optional>
#include <vector>

#include "optimizer.h"

namespace voxgrad::optim {

/// Base class of all schedules. A schedule keeps a reference to its optimizer, which must outlive the schedule.
///
/// load_state_dict throws Error if the state is incomplete or comes from another class of schedule.
class Schedule : public nn::Stateful, NonCopyable {
 public:
  /// Returns the progress of the schedule. The state contains neither the options of the schedule nor the current
  /// learning rates, which are part of the optimizer's state.
  TensorMap state_dict() const override { return nn::write_state(name_, const_cast<Schedule*>(this)->fields()); }

 protected:
  Schedule(const char* name, Optimizer& optimizer) : name_(name), optimizer_(optimizer) {}
  Optimizer& optimizer() const { return optimizer_; }
  const char* name() const { return name_; }
  /// Returns the numbers that make up the state.
  virtual nn::Fields fields() = 0;

 private:
  void read_state(const TensorMap& state, bool keep) override;

  const char* name_;
  Optimizer& optimizer_;
};

/// A schedule that computes the learning rates from the number of steps. The initial learning rate of a group is the
/// rate that the group has when the first schedule of the optimizer is constructed. Later schedules of the same
/// optimizer use the same initial rates, unless set_lr() has been called in between.
class StepSchedule : public Schedule {
 public:
  /// Counts one step, which may be an epoch or a batch, and sets the learning rates. Throws Error, before anything is
  /// changed, if a rate would be negative or not finite.
  void step() { set_steps(steps_ + 1); }
  /// Returns the number of steps.
  int64_t steps() const { return steps_; }
  /// Returns the learning rate after `steps` steps for a group whose initial rate is `initial`.
  virtual double lr_at(int64_t steps, double initial) const = 0;
  /// Returns the momentum (beta1 of Adam) after `steps` steps, or nullopt if the schedule does not change the momentum.
  virtual std::optional<double> momentum_at(int64_t) const { return std::nullopt; }

 protected:
  StepSchedule(const char* name, Optimizer& optimizer);
  /// Sets the number of steps, the learning rates and the momentum. Constructors of derived classes call set_steps(0).
  void set_steps(int64_t steps);
  nn::Fields fields() override {
    nn::Fields list{{"steps", &steps_}};
    for (size_t group = 0; group < initial_.size(); ++group)
      list.emplace_back(concat("initial_lr.", group), &initial_[group]);
    return list;
  }

 private:
  int64_t steps_ = 0;
  std::vector<double> initial_;  ///< initial learning rate of each group
};

/// Throws "<schedule>: milestones must not be negative, got <milestone>" for the first negative milestone.
inline void check_milestones(const char* schedule, const std::vector<int64_t>& milestones) {
  for (const int64_t milestone : milestones)
    check(milestone >= 0, schedule, "milestones must not be negative, got ", milestone);
}

/// Interpolates linearly from `start` at step 0 to `end` at step `total`. Returns `end` for later steps.
inline double ramp(double start, double end, int64_t steps, int64_t total) {
  const double done = static_cast<double>(std::min(steps, total)) / static_cast<double>(total);
  return start + (end - start) * done;
}

/// A StepSchedule that computes its rates with the functions of the struct Options. Options has the members kName (the
/// class name), validate(), lr_at() and, optionally, momentum_at().
template <class Options>
class ScheduleOf : public StepSchedule {
 public:
  /// Sets the learning rates for step 0. Throws Error for invalid options.
  explicit ScheduleOf(Optimizer& optimizer, const Options& options = {})
      : StepSchedule(Options::kName, optimizer), options_(options) {
    options_.validate();
    set_steps(0);
  }
  double lr_at(int64_t steps, double initial) const override { return options_.lr_at(steps, initial); }
  std::optional<double> momentum_at(int64_t steps) const override {
    if constexpr (requires { options_.momentum_at(steps); }) return options_.momentum_at(steps);
    return std::nullopt;
  }

 private:
  Options options_;
};

/// Multiplies the learning rate by gamma every step_size steps.
struct StepLROptions {
  int64_t step_size = 1;  ///< steps from one change of the rate to the next; positive
  double gamma = 0.1;     ///< factor of each change

  static constexpr const char* kName = "StepLR";
  void validate() const { check_options(kName, {{"step_size", step_size, 1}, {"gamma", gamma}}); }
  double lr_at(int64_t steps, double initial) const {
    return initial * std::pow(gamma, static_cast<double>(steps / step_size));
  }
};
using StepLR = ScheduleOf<StepLROptions>;

/// Multiplies the learning rate by `factor` during the first total_iters steps.
struct ConstantLROptions {
  double factor = 1.0 / 3;  ///< in [0, 1]
  int64_t total_iters = 5;  ///< number of steps with the multiplied rate

  static constexpr const char* kName = "ConstantLR";
  void validate() const { check_options(kName, {{"factor", factor, 0, 1}, {"total_iters", total_iters, 1}}); }
  double lr_at(int64_t steps, double initial) const { return steps < total_iters ? initial * factor : initial; }
};
using ConstantLR = ScheduleOf<ConstantLROptions>;

/// Multiplies the learning rate by a factor that changes linearly from start_factor to end_factor in total_iters steps
/// and then remains constant.
struct LinearLROptions {
  double start_factor = 1.0 / 3;  ///< in [0, 1]
  double end_factor = 1;          ///< in [0, 1]
  int64_t total_iters = 5;        ///< number of steps after which the factor is end_factor

  static constexpr const char* kName = "LinearLR";
  void validate() const {
    check_options(
        kName,
        {{"start_factor", start_factor, 0, 1}, {"end_factor", end_factor, 0, 1}, {"total_iters", total_iters, 1}});
  }
  double lr_at(int64_t steps, double initial) const {
    return initial * ramp(start_factor, end_factor, steps, total_iters);
  }
};
using LinearLR = ScheduleOf<LinearLROptions>;

/// Decreases the learning rate along half a cosine to eta_min in t_max steps, after an optional linear warm-up
/// (Loshchilov and Hutter, "SGDR", ICLR 2017). After t_max steps the rate follows the cosine and rises again, as in
/// PyTorch. The warm-up is an extension of PyTorch's schedule.
struct CosineAnnealingLROptions {
  int64_t t_max = 0;                  ///< steps from the end of the warm-up to eta_min; positive
  double eta_min = 0;                 ///< the lowest learning rate
  int64_t warmup_steps = 0;           ///< steps of the warm-up
  double warmup_start_factor = 0.01;  ///< first rate of the warm-up, as a fraction of the initial rate, in [0, 1]

  static constexpr const char* kName = "CosineAnnealingLR";
  void validate() const {
    check_options(kName, {{"t_max", t_max, 1},
                          {"eta_min", eta_min},
                          {"warmup_steps", warmup_steps},
                          {"warmup_start_factor", warmup_start_factor, 0, 1}});
  }
  double lr_at(int64_t steps, double initial) const {
    if (steps < warmup_steps) return initial * ramp(warmup_start_factor, 1, steps, warmup_steps);
    const double turn = static_cast<double>(steps - warmup_steps) / static_cast<double>(t_max);
    return eta_min + (initial - eta_min) * (1 + std::cos(std::numbers::pi * turn)) / 2;
  }
};
using CosineAnnealingLR = ScheduleOf<CosineAnnealingLROptions>;

/// Decreases the learning rate along half a cosine towards eta_min, and restarts from the initial rate. The first
/// period has t_0 steps; each later period is t_mult times as long as the previous period (Loshchilov and Hutter,
/// "SGDR", ICLR 2017).
struct CosineAnnealingWarmRestartsOptions {
  int64_t t_0 = 0;     ///< steps until the first restart; positive
  int64_t t_mult = 1;  ///< length of a period relative to the previous period; at least 1
  double eta_min = 0;  ///< the lowest learning rate

  static constexpr const char* kName = "CosineAnnealingWarmRestarts";
  void validate() const { check_options(kName, {{"t_0", t_0, 1}, {"t_mult", t_mult, 1}, {"eta_min", eta_min}}); }
  double lr_at(int64_t steps, double initial) const {
    // Steps since the last restart, and length of the current period. Both have type double, because a period may
    // exceed 2^63.
    double since = static_cast<double>(t_mult == 1 ? steps % t_0 : steps), period = static_cast<double>(t_0);
    for (; since >= period; period *= static_cast<double>(t_mult)) since -= period;
    return eta_min + (initial - eta_min) * (1 + std::cos(std::numbers::pi * since / period)) / 2;
  }
};
using CosineAnnealingWarmRestarts = ScheduleOf<CosineAnnealingWarmRestartsOptions>;

/// Multiplies the learning rate by gamma at each milestone.
struct MultiStepLROptions {
  std::vector<int64_t>
      milestones{};    ///< step numbers, in any order; a milestone that occurs n times multiplies n times
  double gamma = 0.1;  ///< factor of each milestone

  static constexpr const char* kName = "MultiStepLR";
  void validate() const {
    check_milestones(kName, milestones);
    check_options(kName, {{"gamma", gamma}});
  }
  double lr_at(int64_t steps, double initial) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [&](int64_t m) { return m <= steps; });
    return initial * std::pow(gamma, static_cast<double>(passed));
  }
};
using MultiStepLR = ScheduleOf<MultiStepLROptions>;

/// Multiplies the learning rate by gamma at every step: ExponentialLR(optimizer, 0.9).
struct ExponentialLROptions {
  ExponentialLROptions(double factor) : gamma(factor) {}
  double gamma;

  static constexpr const char* kName = "ExponentialLR";
  void validate() const { check_options(kName, {{"gamma", gamma}}); }
  double lr_at(int64_t steps, double initial) const { return initial * std::pow(gamma, static_cast<double>(steps)); }
};
using ExponentialLR = ScheduleOf<ExponentialLROptions>;

/// Multiplies the initial learning rate by (1 - min(steps, total_iters) / total_iters) ^ power. If power > 0, the rate
/// is 0 from step total_iters on.
struct PolynomialLROptions {
  int64_t total_iters = 5;  ///< number of steps until the rate is 0
  double power = 1;         ///< exponent

  static constexpr const char* kName = "PolynomialLR";
  void validate() const { check_options(kName, {{"total_iters", total_iters, 1}, {"power", power}}); }
  double lr_at(int64_t steps, double initial) const {
    return initial * std::pow(ramp(1, 0, steps, total_iters), power);
  }
};
using PolynomialLR = ScheduleOf<PolynomialLROptions>;

/// Multiplies the initial learning rate by factor(steps): LambdaLR(optimizer, [](int64_t steps) { return ...; }). The
/// function is not part of the state. The constructor throws Error if the function is empty.
struct LambdaLROptions {
  template <class F>
  LambdaLROptions(F function) : factor(std::move(function)) {}
  std::function<double(int64_t steps)> factor;

  static constexpr const char* kName = "LambdaLR";
  void validate() const { check(static_cast<bool>(factor), kName, "the function is empty"); }
  double lr_at(int64_t steps, double initial) const { return initial * factor(steps); }
};
using LambdaLR = ScheduleOf<LambdaLROptions>;

/// The shape of a transition between two learning rates.
enum class AnnealStrategy : uint8_t { cos, linear };

/// Increases the learning rate to max_lr and decreases it again, and changes the momentum in the opposite direction
/// (Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019). The
/// rate reaches its last value after total_steps - 1 steps. One more step keeps this value; further calls of step()
/// throw Error.
struct OneCycleLROptions {
  double max_lr = 0;        ///< highest rate, the same for all groups; the optimizer's rates are ignored
  int64_t total_steps = 0;  ///< number of epochs * steps per epoch
  double pct_start = 0.3;   ///< fraction of the steps in which the rate increases
  AnnealStrategy anneal_strategy = AnnealStrategy::cos;
  bool cycle_momentum = true;     ///< requires an optimizer with momentum or betas
  double base_momentum = 0.85;    ///< momentum at max_lr
  double max_momentum = 0.95;     ///< momentum at the first and the last rate
  double div_factor = 25;         ///< ratio of max_lr to the first rate
  double final_div_factor = 1e4;  ///< ratio of the first rate to the last rate
  bool three_phase = false;  ///< the rate decreases to the first rate as fast as it rose, and then to the last rate

  static constexpr const char* kName = "OneCycleLR";
  void validate() const;
  double lr_at(int64_t steps, double initial) const;
  std::optional<double> momentum_at(int64_t steps) const;
};
using OneCycleLR = ScheduleOf<OneCycleLROptions>;

/// Runs several schedules one after another. Schedule i starts at step milestones[i - 1], and its steps are counted
/// from there. All schedules must have been created for the same optimizer; their own step counts are ignored.
class SequentialLR : public StepSchedule {
 public:
  /// Throws Error if the milestones are negative or decrease, if a schedule is null, or if the number of schedules is
  /// not the number of milestones plus one.
  SequentialLR(Optimizer& optimizer, std::vector<std::shared_ptr<StepSchedule>> schedules,
               std::vector<int64_t> milestones);
  double lr_at(int64_t steps, double initial) const override { return current(&steps).lr_at(steps, initial); }
  std::optional<double> momentum_at(int64_t steps) const override { return current(&steps).momentum_at(steps); }

 private:
  /// On entry, `*steps` is a number of steps of this SequentialLR. Returns the schedule that is active after these
  /// steps, and sets `*steps` to the number of steps since the start of that schedule.
  const StepSchedule& current(int64_t* steps) const {
    const auto next = std::upper_bound(milestones_.begin(), milestones_.end(), *steps);
    if (next != milestones_.begin()) *steps -= *(next - 1);
    return *schedules_[static_cast<size_t>(next - milestones_.begin())];
  }

  std::vector<std::shared_ptr<StepSchedule>> schedules_;
  std::vector<int64_t> milestones_;
};

/// Selects whether a smaller or a larger metric is better.
enum class PlateauMode : uint8_t { min, max };
/// Selects whether a threshold is relative to the best metric or absolute.
enum class ThresholdMode : uint8_t { relative, absolute };

/// Options of ReduceLROnPlateau.
struct ReduceLROnPlateauOptions {
  PlateauMode mode = PlateauMode::min;
  double factor = 0.1;      ///< factor of each reduction, in [0, 1)
  int64_t patience = 10;    ///< consecutive steps without improvement that are tolerated
  double threshold = 1e-4;  ///< minimum improvement of the metric; with ThresholdMode::relative, it must be below 1
  ThresholdMode threshold_mode = ThresholdMode::relative;
  int64_t cooldown = 0;  ///< number of steps after each reduction in which a lack of improvement is ignored
  double min_lr = 0;     ///< lower bound of the learning rates
  double eps = 1e-8;     ///< reductions of a rate by at most this amount are skipped
};

/// Multiplies the learning rates by `factor` when a metric has stopped improving. A relative threshold is a fraction of
/// |best|: with PlateauMode::min, a metric improves if it is below best - threshold * |best|. PyTorch uses best * (1 -
/// threshold) instead, so that a constant negative metric counts as an improvement at every step.
class ReduceLROnPlateau : public Schedule {
 public:
  explicit ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options = {});
  /// Counts one step with this metric and reduces the learning rates if necessary. NaN counts as no improvement.
  void step(double metric);
  /// Returns the best metric so far.
  double best() const { return best_; }

 protected:
  nn::Fields fields() override {
    return nn::named_fields("best, bad_steps, cooldown_left", best_, bad_steps_, cooldown_left_);
  }

 private:
  bool is_better(double metric) const;

  ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_steps_ = 0;
  int64_t cooldown_left_ = 0;
};

}  // namespace voxgrad::optim
