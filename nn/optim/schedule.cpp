#include "nn/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace voxgrad::optim {

Schedule::Schedule(const char* name, Optimizer& optimizer) : name_(name), optimizer_(optimizer) {}

TensorMap Schedule::state_dict() const {
  TensorMap state;
  nn::write_class(state, name_);
  nn::write_fields(state, "", const_cast<Schedule*>(this)->fields());
  return state;
}

void Schedule::read_state(const TensorMap& state, bool keep) {
  const nn::Fields own = fields();
  check(state.contains(std::string("class.") + name_), name_, "this is not the state of a ", name_);
  nn::check_version(state, name_);
  check(state.size() == own.size() + 1, name_, "the state has ", state.size(), " entries, expected ", own.size() + 1);
  const TensorMap before = state_dict();
  try {
    nn::read_fields(state, "", own, name_);
    check_fields();
  } catch (...) {
    nn::read_fields(before, "", own, name_);
    throw;
  }
  if (!keep) nn::read_fields(before, "", own, name_);
}

void Schedule::check_state_dict(const TensorMap& state) const {
  const_cast<Schedule*>(this)->read_state(state, false);  // puts everything back
}

void Schedule::load_state_dict(const TensorMap& state) { read_state(state, true); }

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
    check_not_negative(name(), {{"the learning rate", rates.back()}});
  }
  const std::optional<double> momentum = momentum_at(steps);
  for (size_t group = 0; group < rates.size(); ++group) {
    if (momentum) optimizer().set_momentum(group, *momentum);
    optimizer().change_lr(group, rates[group]);
  }
  steps_ = steps;
}

nn::Fields StepSchedule::fields() {
  nn::Fields list{{"steps", &steps_}};
  for (size_t group = 0; group < initial_.size(); ++group)
    list.emplace_back(concat("initial_lr.", group), &initial_[group]);
  return list;
}

void StepSchedule::check_fields() const {
  check_count(name(), "steps", steps_, 0);
  for (size_t group = 0; group < initial_.size(); ++group)
    check_not_negative(name(), {{concat("initial_lr.", group).c_str(), initial_[group]}});
}

StepLR::StepLR(Optimizer& optimizer, const StepLROptions& options)
    : StepSchedule("StepLR", optimizer), options_(options) {
  check(options.step_size > 0, name(), "step_size must be positive, got ", options.step_size);
  check_not_negative(name(), {{"gamma", options.gamma}});
  set_steps(0);
}

double StepLR::lr_at(int64_t steps, double initial) const {
  return initial * std::pow(options_.gamma, static_cast<double>(steps / options_.step_size));
}

LinearLR::LinearLR(Optimizer& optimizer, const LinearLROptions& options)
    : StepSchedule("LinearLR", optimizer), options_(options) {
  check(options.start_factor > 0 && options.start_factor <= 1, name(), "start_factor must lie in (0, 1], got ",
        options.start_factor);
  check(options.end_factor >= 0 && options.end_factor <= 1, name(), "end_factor must lie in [0, 1], got ",
        options.end_factor);
  check(options.total_iters > 0, name(), "total_iters must be positive, got ", options.total_iters);
  set_steps(0);
}

namespace {

/// From `start` at 0 to `end` at `total` and beyond.
double ramp(double start, double end, int64_t steps, int64_t total) {
  const double done = static_cast<double>(std::min(steps, total)) / static_cast<double>(total);
  return start + (end - start) * done;
}

}  // namespace

double LinearLR::lr_at(int64_t steps, double initial) const {
  return initial * ramp(options_.start_factor, options_.end_factor, steps, options_.total_iters);
}

CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingLROptions& options)
    : StepSchedule("CosineAnnealingLR", optimizer), options_(options) {
  check(options.t_max > 0, name(), "t_max must be positive, got ", options.t_max);
  check(options.warmup_steps >= 0, name(), "warmup_steps must not be negative, got ", options.warmup_steps);
  check(options.warmup_start_factor > 0 && options.warmup_start_factor <= 1, name(),
        "warmup_start_factor must lie in (0, 1], got ", options.warmup_start_factor);
  check_not_negative(name(), {{"eta_min", options.eta_min}});
  set_steps(0);
}

double CosineAnnealingLR::lr_at(int64_t steps, double initial) const {
  if (steps < options_.warmup_steps)
    return initial * ramp(options_.warmup_start_factor, 1, steps, options_.warmup_steps);
  const double turn = static_cast<double>(steps - options_.warmup_steps) / static_cast<double>(options_.t_max);
  return options_.eta_min + (initial - options_.eta_min) * (1 + std::cos(std::numbers::pi * turn)) / 2;
}

MultiStepLR::MultiStepLR(Optimizer& optimizer, const MultiStepLROptions& options)
    : StepSchedule("MultiStepLR", optimizer), options_(options) {
  check_not_negative(name(), {{"gamma", options.gamma}});
  set_steps(0);
}

double MultiStepLR::lr_at(int64_t steps, double initial) const {
  const auto passed = std::count_if(options_.milestones.begin(), options_.milestones.end(),
                                    [&](int64_t milestone) { return milestone <= steps; });
  return initial * std::pow(options_.gamma, static_cast<double>(passed));
}

ExponentialLR::ExponentialLR(Optimizer& optimizer, double gamma)
    : StepSchedule("ExponentialLR", optimizer), gamma_(gamma) {
  check_not_negative(name(), {{"gamma", gamma}});
  set_steps(0);
}

double ExponentialLR::lr_at(int64_t steps, double initial) const {
  return initial * std::pow(gamma_, static_cast<double>(steps));
}

PolynomialLR::PolynomialLR(Optimizer& optimizer, const PolynomialLROptions& options)
    : StepSchedule("PolynomialLR", optimizer), options_(options) {
  check(options.total_iters > 0, name(), "total_iters must be positive, got ", options.total_iters);
  check_not_negative(name(), {{"power", options.power}});
  set_steps(0);
}

double PolynomialLR::lr_at(int64_t steps, double initial) const {
  return initial * std::pow(ramp(1, 0, steps, options_.total_iters), options_.power);
}

LambdaLR::LambdaLR(Optimizer& optimizer, std::function<double(int64_t)> factor)
    : StepSchedule("LambdaLR", optimizer), factor_(std::move(factor)) {
  check(static_cast<bool>(factor_), name(), "the function is empty");
  set_steps(0);
}

OneCycleLR::OneCycleLR(Optimizer& optimizer, const OneCycleLROptions& options)
    : StepSchedule("OneCycleLR", optimizer), options_(options) {
  check(options.total_steps > 0, name(), "total_steps must be positive, got ", options.total_steps);
  check(options.pct_start >= 0 && options.pct_start <= 1, name(), "pct_start must lie in [0, 1], got ",
        options.pct_start);
  check(options.div_factor > 0 && options.final_div_factor > 0, name(), "factors must be positive, got ",
        options.div_factor, " and ", options.final_div_factor);
  check_not_negative(
      name(),
      {{"max_lr", options.max_lr}, {"base_momentum", options.base_momentum}, {"max_momentum", options.max_momentum}});
  set_steps(0);
}

OneCycleLR::Place OneCycleLR::place(int64_t steps) const {
  check(steps <= options_.total_steps, name(), "step ", steps, " of ", options_.total_steps);
  const auto now = static_cast<double>(steps), total = static_cast<double>(options_.total_steps);
  struct Phase {
    double end;
    int from, to;
  };
  const double up = options_.pct_start * total;
  const std::vector<Phase> phases = options_.three_phase
                                        ? std::vector<Phase>{{up - 1, 0, 1}, {2 * up - 2, 1, 0}, {total - 1, 0, 2}}
                                        : std::vector<Phase>{{up - 1, 0, 1}, {total - 1, 1, 2}};
  double begin = 0;
  size_t i = 0;
  for (; i + 1 < phases.size() && now > phases[i].end; ++i) begin = phases[i].end;
  const double length = phases[i].end - begin;
  return {phases[i].from, phases[i].to, length > 0 ? std::min(1.0, (now - begin) / length) : 1};
}

double OneCycleLR::anneal(double from, double to, double done) const {
  if (options_.anneal_strategy == AnnealStrategy::linear) return from + (to - from) * done;
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * done));
}

double OneCycleLR::lr_at(int64_t steps, double) const {
  const Place p = place(steps);
  const double first = options_.max_lr / options_.div_factor;
  const double rates[] = {first, options_.max_lr, first / options_.final_div_factor};
  return anneal(rates[p.from], rates[p.to], p.done);
}

std::optional<double> OneCycleLR::momentum_at(int64_t steps) const {
  if (!options_.cycle_momentum) return std::nullopt;
  const Place p = place(steps);
  const double momenta[] = {options_.max_momentum, options_.base_momentum, options_.max_momentum};
  return anneal(momenta[p.from], momenta[p.to], p.done);
}

SequentialLR::SequentialLR(Optimizer& optimizer, std::vector<std::shared_ptr<StepSchedule>> schedules,
                           std::vector<int64_t> milestones)
    : StepSchedule("SequentialLR", optimizer), schedules_(std::move(schedules)), milestones_(std::move(milestones)) {
  check(milestones_.size() + 1 == schedules_.size(), name(), "expects one milestone fewer than schedules, got ",
        milestones_.size(), " and ", schedules_.size());
  check(std::is_sorted(milestones_.begin(), milestones_.end()), name(), "milestones must increase");
  for (const auto& schedule : schedules_) check(schedule != nullptr, name(), "a schedule is null");
  set_steps(0);
}

const StepSchedule& SequentialLR::current(int64_t* steps) const {
  const auto next = std::upper_bound(milestones_.begin(), milestones_.end(), *steps);
  if (next != milestones_.begin()) *steps -= *(next - 1);
  return *schedules_[static_cast<size_t>(next - milestones_.begin())];
}

double SequentialLR::lr_at(int64_t steps, double initial) const { return current(&steps).lr_at(steps, initial); }
std::optional<double> SequentialLR::momentum_at(int64_t steps) const { return current(&steps).momentum_at(steps); }

ReduceLROnPlateau::ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
    : Schedule("ReduceLROnPlateau", optimizer),
      options_(options),
      best_((options.mode == PlateauMode::min ? 1 : -1) * std::numeric_limits<double>::infinity()) {
  check(options.factor >= 0 && options.factor < 1, name(), "factor must lie in [0, 1), got ", options.factor);
  check(options.patience >= 0 && options.cooldown >= 0, name(), "patience and cooldown must not be negative, got ",
        options.patience, " and ", options.cooldown);
  check_not_negative(name(), {{"threshold", options.threshold}, {"min_lr", options.min_lr}, {"eps", options.eps}});
  check(options.threshold_mode == ThresholdMode::absolute || options.threshold < 1, name(),
        "a relative threshold must be below 1, got ", options.threshold);
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const double sign = options_.mode == PlateauMode::min ? -1 : 1;
  if (options_.threshold_mode == ThresholdMode::absolute) return sign * metric > sign * best_ + options_.threshold;
  return sign * metric > sign * best_ * (1 + sign * options_.threshold);
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
  if (bad_steps_ > options_.patience) reduce();
}

void ReduceLROnPlateau::reduce() {
  for (size_t group = 0; group < optimizer().num_groups(); ++group) {
    const double lr = optimizer().lr(group), reduced = std::max(lr * options_.factor, options_.min_lr);
    if (lr - reduced > options_.eps) optimizer().set_lr(group, reduced);
  }
  cooldown_left_ = options_.cooldown;
  bad_steps_ = 0;
}

nn::Fields ReduceLROnPlateau::fields() {
  return {{"best", &best_}, {"bad_steps", &bad_steps_}, {"cooldown_left", &cooldown_left_}};
}

void ReduceLROnPlateau::check_fields() const {
  check(!std::isnan(best_), name(), "best must not be NaN");
  check_count(name(), "bad_steps", bad_steps_, 0);
  check_count(name(), "cooldown_left", cooldown_left_, 0);
}

}  // namespace voxgrad::optim
