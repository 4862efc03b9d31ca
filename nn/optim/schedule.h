// Learning-rate schedules: they set the learning rates of an optimizer's groups as training goes on.
#pragma once

#include <limits>
#include <vector>

#include "nn/optim/optimizer.h"

namespace voxgrad::optim {

/// Base of all schedules; each keeps a reference to its optimizer, which must outlive it.
class Schedule {
 public:
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;
  virtual ~Schedule() = default;

  /// How far the schedule is. The options are not part of it, and the learning rates are the optimizer's.
  TensorMap state_dict() const;
  /// Throws as load_state_dict does, and changes nothing.
  void check_state_dict(const TensorMap& state) const;
  /// Throws, before anything is changed, if `state` comes from another kind of schedule, is not complete, or holds
  /// numbers that no run leaves: counts outside [0, 2^62], learning rates that are negative or not finite, NaN.
  void load_state_dict(const TensorMap& state);

 protected:
  Schedule(const char* name, Optimizer& optimizer);
  Optimizer& optimizer() const { return optimizer_; }
  const char* name() const { return name_; }
  virtual nn::Fields fields() = 0;
  /// Throws unless the fields can be what a run of this schedule leaves.
  virtual void check_fields() const = 0;

 private:
  void read_state(const TensorMap& state, bool keep);

  const char* name_;
  Optimizer& optimizer_;
};

/// A schedule that is a function of the number of steps taken: the learning rate of each group is its initial one,
/// as found when the schedule was made, times or towards what the function says.
class StepSchedule : public Schedule {
 public:
  /// Counts one step (an epoch or a batch, as the caller likes) and sets the learning rates. Throws, before anything is
  /// changed, if one would not be finite or be negative.
  void step() { set_steps(steps_ + 1); }
  int64_t steps() const { return steps_; }

 protected:
  StepSchedule(const char* name, Optimizer& optimizer);
  /// The learning rate after `steps` steps, from the initial one.
  virtual double lr_at(int64_t steps, double initial) const = 0;
  /// Sets the learning rates for this number of steps; constructors of derived classes do, for 0.
  void set_steps(int64_t steps);
  nn::Fields fields() override;
  void check_fields() const override;

 private:
  int64_t steps_ = 0;
  std::vector<double> initial_;
};

struct StepLROptions {
  int64_t step_size = 1;
  double gamma = 0.1;
};

/// Times gamma every step_size steps.
class StepLR : public StepSchedule {
 public:
  StepLR(Optimizer& optimizer, const StepLROptions& options);

 protected:
  double lr_at(int64_t steps, double initial) const override;

 private:
  StepLROptions options_;
};

struct LinearLROptions {
  double start_factor = 1.0 / 3;  ///< in (0, 1]
  double end_factor = 1;          ///< in [0, 1]
  int64_t total_iters = 5;
};

/// A factor that goes linearly from start_factor to end_factor in total_iters steps, and stays there.
class LinearLR : public StepSchedule {
 public:
  explicit LinearLR(Optimizer& optimizer, const LinearLROptions& options = {});

 protected:
  double lr_at(int64_t steps, double initial) const override;

 private:
  LinearLROptions options_;
};

struct CosineAnnealingLROptions {
  int64_t t_max = 0;  ///< steps from the end of the warm-up to eta_min
  double eta_min = 0;
  int64_t warmup_steps = 0;  ///< steps before that, through which the learning rate grows linearly
  double warmup_start_factor = 0.01;
};

/// Half a cosine from the initial learning rate down to eta_min, after a linear warm-up; going on beyond t_max it
/// comes up again, as PyTorch's does. Loshchilov and Hutter, "SGDR", ICLR 2017.
class CosineAnnealingLR : public StepSchedule {
 public:
  CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingLROptions& options);

 protected:
  double lr_at(int64_t steps, double initial) const override;

 private:
  CosineAnnealingLROptions options_;
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

/// Multiplies the learning rates by `factor` when a metric has stopped getting better.
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
  void reduce();

  ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_steps_ = 0;
  int64_t cooldown_left_ = 0;
};

}  // namespace voxgrad::optim
