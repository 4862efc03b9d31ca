// Learning-rate schedules: they set the learning rates of an optimizer's groups as training goes on.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numbers>
#include <optional>
#include <vector>

#include "optimizer.h"

namespace voxgrad::optim {

/// Base of all schedules; each keeps a reference to its optimizer, which must outlive it.
///
/// load_state_dict throws if the state comes from another kind of schedule, is not complete, or holds numbers that no
/// run leaves: counts outside [0, 2^62], learning rates that are negative or not finite, NaN.
class Schedule : public nn::Stateful {
 public:
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// How far the schedule is. The options are not part of it, and the learning rates are the optimizer's.
  TensorMap state_dict() const override;

 protected:
  Schedule(const char* name, Optimizer& optimizer) : name_(name), optimizer_(optimizer) {}
  Optimizer& optimizer() const { return optimizer_; }
  const char* name() const { return name_; }
  virtual nn::Fields fields() = 0;
  /// Throws unless the fields can be what a run of this schedule leaves.
  virtual void check_fields() const = 0;

 private:
  void read_state(const TensorMap& state, bool keep) override;

  const char* name_;
  Optimizer& optimizer_;
};

/// A schedule that is a function of the number of steps taken: the learning rate of each group is its initial one,
/// times or towards what the function says. The initial one is the rate as found when the schedule was made; where a
/// schedule has set that before, and not the caller, it is that schedule's.
class StepSchedule : public Schedule {
 public:
  /// Counts one step (an epoch or a batch, as the caller likes) and sets the learning rates. Throws, before anything is
  /// changed, if one would not be finite or be negative.
  void step() { set_steps(steps_ + 1); }
  int64_t steps() const { return steps_; }
  /// The learning rate after `steps` steps, from the initial one.
  virtual double lr_at(int64_t steps, double initial) const = 0;
  /// The momentum (beta1 of Adam) after `steps` steps, if it is part of the schedule.
  virtual std::optional<double> momentum_at(int64_t) const { return std::nullopt; }

 protected:
  StepSchedule(const char* name, Optimizer& optimizer);
  /// Sets the learning rates for this number of steps; constructors of derived classes do, for 0.
  void set_steps(int64_t steps);
  nn::Fields fields() override;
  void check_fields() const override;

 private:
  int64_t steps_ = 0;
  std::vector<double> initial_;
};

/// Throws "<schedule>: <option> must be positive, got -1".
inline void check_positive(const char* schedule, const char* option, int64_t value) {
  check(value > 0, schedule, option, " must be positive, got ", value);
}
/// Throws "<schedule>: <option> must lie in <range>, got 2" unless it is `inside`.
inline void check_in(bool inside, const char* schedule, const char* option, const char* range, double value) {
  check(inside, schedule, option, " must lie in ", range, ", got ", value);
}

/// Throws "<schedule>: milestones must not be negative, got -1".
inline void check_milestones(const char* schedule, const std::vector<int64_t>& milestones) {
  for (const int64_t milestone : milestones)
    check(milestone >= 0, schedule, "milestones must not be negative, got ", milestone);
}

/// From `start` at 0 to `end` at `total` and beyond.
inline double ramp(double start, double end, int64_t steps, int64_t total) {
  const double done = static_cast<double>(std::min(steps, total)) / static_cast<double>(total);
  return start + (end - start) * done;
}

/// A StepSchedule by its options, which have members kName, validate(), lr_at(), perhaps momentum_at().
template <class Options>
class ScheduleOf : public StepSchedule {
 public:
  /// Throws Error for options out of range.
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

/// Times gamma every step_size steps.
struct StepLROptions {
  int64_t step_size = 1;
  double gamma = 0.1;

  static constexpr const char* kName = "StepLR";
  void validate() const {
    check_positive(kName, "step_size", step_size);
    check_not_negative(kName, {{"gamma", gamma}});
  }
  double lr_at(int64_t steps, double initial) const {
    return initial * std::pow(gamma, static_cast<double>(steps / step_size));
  }
};
using StepLR = ScheduleOf<StepLROptions>;

/// Times `factor` for the first total_iters steps.
struct ConstantLROptions {
  double factor = 1.0 / 3;  ///< in [0, 1]
  int64_t total_iters = 5;

  static constexpr const char* kName = "ConstantLR";
  void validate() const {
    check_in(factor >= 0 && factor <= 1, kName, "factor", "[0, 1]", factor);
    check_positive(kName, "total_iters", total_iters);
  }
  double lr_at(int64_t steps, double initial) const { return steps < total_iters ? initial * factor : initial; }
};
using ConstantLR = ScheduleOf<ConstantLROptions>;

/// A factor that goes linearly from start_factor to end_factor in total_iters steps, and stays there.
struct LinearLROptions {
  double start_factor = 1.0 / 3;  ///< in (0, 1]
  double end_factor = 1;          ///< in [0, 1]
  int64_t total_iters = 5;

  static constexpr const char* kName = "LinearLR";
  void validate() const {
    check_in(start_factor > 0 && start_factor <= 1, kName, "start_factor", "(0, 1]", start_factor);
    check_in(end_factor >= 0 && end_factor <= 1, kName, "end_factor", "[0, 1]", end_factor);
    check_positive(kName, "total_iters", total_iters);
  }
  double lr_at(int64_t steps, double initial) const {
    return initial * ramp(start_factor, end_factor, steps, total_iters);
  }
};
using LinearLR = ScheduleOf<LinearLROptions>;

/// Half a cosine from the initial learning rate down to eta_min, after a linear warm-up; going on beyond t_max it
/// comes up again, as PyTorch's does. Loshchilov and Hutter, "SGDR", ICLR 2017.
struct CosineAnnealingLROptions {
  int64_t t_max = 0;  ///< steps from the end of the warm-up to eta_min
  double eta_min = 0;
  int64_t warmup_steps = 0;  ///< steps before that, through which the learning rate grows linearly
  double warmup_start_factor = 0.01;

  static constexpr const char* kName = "CosineAnnealingLR";
  void validate() const {
    check_positive(kName, "t_max", t_max);
    check(warmup_steps >= 0, kName, "warmup_steps must not be negative, got ", warmup_steps);
    check_in(warmup_start_factor > 0 && warmup_start_factor <= 1, kName, "warmup_start_factor", "(0, 1]",
             warmup_start_factor);
    check_not_negative(kName, {{"eta_min", eta_min}});
  }
  double lr_at(int64_t steps, double initial) const {
    if (steps < warmup_steps) return initial * ramp(warmup_start_factor, 1, steps, warmup_steps);
    const double turn = static_cast<double>(steps - warmup_steps) / static_cast<double>(t_max);
    return eta_min + (initial - eta_min) * (1 + std::cos(std::numbers::pi * turn)) / 2;
  }
};
using CosineAnnealingLR = ScheduleOf<CosineAnnealingLROptions>;

/// Half a cosine from the initial learning rate towards eta_min in t_0 steps, then again from the initial one, each
/// time in t_mult times as many steps. Loshchilov and Hutter, "SGDR", ICLR 2017.
struct CosineAnnealingWarmRestartsOptions {
  int64_t t_0 = 0;     ///< steps until the first restart
  int64_t t_mult = 1;  ///< at least 1
  double eta_min = 0;

  static constexpr const char* kName = "CosineAnnealingWarmRestarts";
  void validate() const {
    check_positive(kName, "t_0", t_0);
    check_positive(kName, "t_mult", t_mult);
    check_not_negative(kName, {{"eta_min", eta_min}});
  }
  double lr_at(int64_t steps, double initial) const;
};
using CosineAnnealingWarmRestarts = ScheduleOf<CosineAnnealingWarmRestartsOptions>;

/// Times gamma at each milestone.
struct MultiStepLROptions {
  std::vector<int64_t> milestones{};  ///< one that is listed twice counts twice
  double gamma = 0.1;

  static constexpr const char* kName = "MultiStepLR";
  void validate() const {
    check_milestones(kName, milestones);
    check_not_negative(kName, {{"gamma", gamma}});
  }
  double lr_at(int64_t steps, double initial) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [&](int64_t m) { return m <= steps; });
    return initial * std::pow(gamma, static_cast<double>(passed));
  }
};
using MultiStepLR = ScheduleOf<MultiStepLROptions>;

/// Times gamma at every step: ExponentialLR(optimizer, 0.9).
struct ExponentialLROptions {
  ExponentialLROptions(double factor) : gamma(factor) {}
  double gamma;

  static constexpr const char* kName = "ExponentialLR";
  void validate() const { check_not_negative(kName, {{"gamma", gamma}}); }
  double lr_at(int64_t steps, double initial) const { return initial * std::pow(gamma, static_cast<double>(steps)); }
};
using ExponentialLR = ScheduleOf<ExponentialLROptions>;

/// Times (1 - steps / total_iters) ^ power, and 0 from there on.
struct PolynomialLROptions {
  int64_t total_iters = 5;
  double power = 1;

  static constexpr const char* kName = "PolynomialLR";
  void validate() const {
    check_positive(kName, "total_iters", total_iters);
    check_not_negative(kName, {{"power", power}});
  }
  double lr_at(int64_t steps, double initial) const {
    return initial * std::pow(ramp(1, 0, steps, total_iters), power);
  }
};
using PolynomialLR = ScheduleOf<PolynomialLROptions>;

/// Times factor(steps): LambdaLR(optimizer, [](int64_t steps) { return ...; }). The function is not part of the state.
struct LambdaLROptions {
  template <class F>
  LambdaLROptions(F function) : factor(std::move(function)) {}
  std::function<double(int64_t steps)> factor;

  static constexpr const char* kName = "LambdaLR";
  void validate() const { check(static_cast<bool>(factor), kName, "the function is empty"); }
  double lr_at(int64_t steps, double initial) const { return initial * factor(steps); }
};
using LambdaLR = ScheduleOf<LambdaLROptions>;

enum class AnnealStrategy : uint8_t { cos, linear };

/// Up to max_lr and down again, the momentum the other way round. The last rate is that after total_steps - 1 steps
/// and one more; step() throws beyond. Smith and Topin,
/// "Super-convergence: very fast training of neural networks using large learning rates", 2019.
struct OneCycleLROptions {
  double max_lr = 0;        ///< of all groups; the optimizer's own rates do not count
  int64_t total_steps = 0;  ///< epochs * steps in each
  double pct_start = 0.3;   ///< the part of them in which the rate grows
  AnnealStrategy anneal_strategy = AnnealStrategy::cos;
  bool cycle_momentum = true;  ///< needs an optimizer with momentum or betas
  double base_momentum = 0.85, max_momentum = 0.95;
  double div_factor = 25;         ///< max_lr / the first rate
  double final_div_factor = 1e4;  ///< the first rate / the last one
  bool three_phase = false;       ///< down to the first rate as fast as up, then to the last one

  static constexpr const char* kName = "OneCycleLR";
  void validate() const;
  double lr_at(int64_t steps, double initial) const;
  std::optional<double> momentum_at(int64_t steps) const;
};
using OneCycleLR = ScheduleOf<OneCycleLROptions>;

/// One schedule after the other, each from its beginning: the i-th from milestones[i - 1] on. All are made for this
/// optimizer; their own counts are not used.
class SequentialLR : public StepSchedule {
 public:
  /// Throws unless milestones increase and are one fewer than the schedules.
  SequentialLR(Optimizer& optimizer, std::vector<std::shared_ptr<StepSchedule>> schedules,
               std::vector<int64_t> milestones);
  double lr_at(int64_t steps, double initial) const override;
  std::optional<double> momentum_at(int64_t steps) const override;

 private:
  /// The schedule of this step; `*steps` becomes its own number of steps.
  const StepSchedule& current(int64_t* steps) const;

  std::vector<std::shared_ptr<StepSchedule>> schedules_;
  std::vector<int64_t> milestones_;
};

enum class PlateauMode : uint8_t { min, max };  ///< whether a smaller or a larger metric is better
enum class ThresholdMode : uint8_t { relative, absolute };

struct ReduceLROnPlateauOptions {
  PlateauMode mode = PlateauMode::min;
  double factor = 0.1;      ///< in [0, 1)
  int64_t patience = 10;    ///< steps without a better metric that are let pass
  double threshold = 1e-4;  ///< by how much a metric has to be better; below 1 if relative
  ThresholdMode threshold_mode = ThresholdMode::relative;
  int64_t cooldown = 0;  ///< steps after a reduction that do not count
  double min_lr = 0;
  double eps = 1e-8;  ///< changes smaller than this are not made
};

/// Multiplies the learning rates by `factor` when a metric has stopped getting better. A relative threshold is a share
/// of |best|: a metric is better in mode min if it is below best - threshold * |best|. PyTorch computes best * (1 -
/// threshold), where every negative metric that stays the same counts as better.
class ReduceLROnPlateau : public Schedule {
 public:
  explicit ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options = {});
  /// Tells the metric of one more step. NaN counts as not better.
  void step(double metric);
  double best() const { return best_; }

 protected:
  nn::Fields fields() override;
  void check_fields() const override;

 private:
  bool is_better(double metric) const;

  ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_steps_ = 0;
  int64_t cooldown_left_ = 0;
};

}  // namespace voxgrad::optim
