// Implements the learning-rate schedules.
#include "nn/optim/schedule.h"

namespace voxgrad::optim {
namespace {

/// Returns the value of the one-cycle curve after `steps` steps. `rates` are the first, the middle and the last value
/// of the curve.
double one_cycle(const OneCycleLROptions& o, int64_t steps, const std::array<double, 3>& rates) {
  check(steps <= o.total_steps, o.kName, "step ", steps, " exceeds total_steps = ", o.total_steps);
  const auto now = static_cast<double>(steps), total = static_cast<double>(o.total_steps);
  struct Phase {
    double end;   // last step of the phase
    size_t from;  // index of the first value of the phase in `rates`
    size_t to;    // index of the last value of the phase in `rates`
  };
  const double up = o.pct_start * total;
  const std::vector<Phase> phases = o.three_phase
                                        ? std::vector<Phase>{{up - 1, 0, 1}, {2 * up - 2, 1, 0}, {total - 1, 0, 2}}
                                        : std::vector<Phase>{{up - 1, 0, 1}, {total - 1, 1, 2}};
  double begin = 0;
  auto phase = phases.begin();
  for (; phase + 1 != phases.end() && now > phase->end; ++phase) begin = phase->end;
  const double length = phase->end - begin, done = length > 0 ? std::min(1.0, (now - begin) / length) : 1;
  const double from = rates[phase->from], to = rates[phase->to];
  if (o.anneal_strategy == AnnealStrategy::linear) return from + (to - from) * done;
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * done));
}

}  // namespace

void Schedule::read_state(const TensorMap& state, bool keep) {
  nn::check_class(state, name_, "a");
  const size_t expected = fields().size() + 1;
  check(state.size() == expected, name_, "the state must have ", expected, " entries, got ", state.size());
  nn::read_fields(state, "", fields(), name_, keep);
}

StepSchedule::StepSchedule(const char* name, Optimizer& optimizer) : Schedule(name, optimizer) {
  for (size_t group = 0; group < optimizer.num_groups(); ++group) {
    std::optional<double>& known = optimizer.initial_lr_[group];
    if (!known) known = optimizer.lr(group);
    initial_.push_back(*known);
  }
}

void StepSchedule::set_steps(int64_t steps) {
  std::vector<double> rates;
  for (double initial : initial_) {
    rates.push_back(lr_at(steps, initial));
    check_options(name(), {{"the learning rate", rates.back()}});
  }
  const std::optional<double> momentum = momentum_at(steps);
  for (size_t group = 0; group < rates.size(); ++group) {
    if (momentum) optimizer().set_momentum(group, *momentum);
    optimizer().change_option(group, {"lr"}, rates[group]);
  }
  steps_ = steps;
}

void OneCycleLROptions::validate() const {
  check(div_factor > 0 && final_div_factor > 0 && std::isfinite(div_factor) && std::isfinite(final_div_factor), kName,
        "div_factor and final_div_factor must be positive and finite, got ", div_factor, " and ", final_div_factor);
  check_options(kName, {{"total_steps", total_steps, 1},
                        {"pct_start", pct_start, 0, 1},
                        {"max_lr", max_lr},
                        {"base_momentum", base_momentum},
                        {"max_momentum", max_momentum}});
}
double OneCycleLROptions::lr_at(int64_t steps, double) const {
  const double first = max_lr / div_factor;
  return one_cycle(*this, steps, {first, max_lr, first / final_div_factor});
}
std::optional<double> OneCycleLROptions::momentum_at(int64_t steps) const {
  if (!cycle_momentum) return std::nullopt;
  return one_cycle(*this, steps, {max_momentum, base_momentum, max_momentum});
}

SequentialLR::SequentialLR(Optimizer& optimizer, std::vector<std::shared_ptr<StepSchedule>> schedules,
                           std::vector<int64_t> milestones)
    : StepSchedule("SequentialLR", optimizer), schedules_(std::move(schedules)), milestones_(std::move(milestones)) {
  check(milestones_.size() + 1 == schedules_.size(), name(),
        "the number of schedules must be the number of milestones plus 1, got ", schedules_.size(), " and ",
        milestones_.size());
  check_milestones(name(), milestones_);
  check(std::is_sorted(milestones_.begin(), milestones_.end()), name(), "milestones must not decrease");
  for (const auto& schedule : schedules_) check(schedule != nullptr, name(), "a schedule is null");
  set_steps(0);
}

ReduceLROnPlateau::ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
    : Schedule("ReduceLROnPlateau", optimizer),
      options_(options),
      best_((options.mode == PlateauMode::min ? 1 : -1) * std::numeric_limits<double>::infinity()) {
  check(options.factor >= 0 && options.factor < 1, name(), "factor must lie in [0, 1), got ", options.factor);
  check_options(name(), {{"patience", options.patience},
                         {"cooldown", options.cooldown},
                         {"threshold", options.threshold},
                         {"min_lr", options.min_lr},
                         {"eps", options.eps}});
  check(options.threshold_mode == ThresholdMode::absolute || options.threshold < 1, name(),
        "a relative threshold must be below 1, got ", options.threshold);
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const double sign = options_.mode == PlateauMode::min ? -1 : 1, best = sign * best_;
  if (options_.threshold_mode == ThresholdMode::absolute) return sign * metric > best + options_.threshold;
  return sign * metric > best * (1 + std::copysign(options_.threshold, best));  // best + threshold * |best|
}

void ReduceLROnPlateau::step(double metric) {
  if (is_better(metric)) {
    best_ = metric;
    bad_steps_ = 0;
  } else {
    ++bad_steps_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_steps_ = 0;
  }
  if (bad_steps_ <= options_.patience) return;
  for (size_t group = 0; group < optimizer().num_groups(); ++group) {
    const double lr = optimizer().lr(group), reduced = std::max(lr * options_.factor, options_.min_lr);
    if (lr - reduced > options_.eps) optimizer().set_lr(group, reduced);
  }
  cooldown_left_ = options_.cooldown;
  bad_steps_ = 0;
}

}  // namespace voxgrad::optim
