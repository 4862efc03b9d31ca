// Tests of learning-rate schedules against PyTorch (see optim_reference.py), and of their state and errors.
#include "nn/optim/schedule.h"

#include <cmath>
#include <functional>
#include <map>

#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

#include "tests/nn/optim_reference.inc"

using namespace optim;

constexpr int kSteps = 20;

using MakeSchedule = std::function<std::unique_ptr<StepSchedule>(Optimizer&)>;

const std::map<std::string, MakeSchedule>& schedules() {
  static const std::map<std::string, MakeSchedule> table{
      {"step", [](Optimizer& o) { return std::make_unique<StepLR>(o, StepLROptions{.step_size = 6, .gamma = 0.5}); }},
      {"linear",
       [](Optimizer& o) {
         return std::make_unique<LinearLR>(o,
                                           LinearLROptions{.start_factor = 0.25, .end_factor = 0.75, .total_iters = 8});
       }},
      {"cosine",
       [](Optimizer& o) {
         return std::make_unique<CosineAnnealingLR>(o, CosineAnnealingLROptions{.t_max = 15, .eta_min = 0.02});
       }},
      {"cosine_warmup",
       [](Optimizer& o) {
         return std::make_unique<CosineAnnealingLR>(o, CosineAnnealingLROptions{.t_max = 15, .warmup_steps = 5});
       }},
      {"multistep",
       [](Optimizer& o) {
         return std::make_unique<MultiStepLR>(o, MultiStepLROptions{.milestones = {12, 4, 4}, .gamma = 0.5});
       }},
      {"exponential", [](Optimizer& o) { return std::make_unique<ExponentialLR>(o, 0.9); }},
      {"polynomial",
       [](Optimizer& o) {
         return std::make_unique<PolynomialLR>(o, PolynomialLROptions{.total_iters = 15, .power = 2.5});
       }},
      {"lambda",
       [](Optimizer& o) {
         return std::make_unique<LambdaLR>(o, [](int64_t n) { return 1 / (1 + static_cast<double>(n)); });
       }},
      {"one_cycle",
       [](Optimizer& o) {
         return std::make_unique<OneCycleLR>(o, OneCycleLROptions{.max_lr = 0.7, .total_steps = 21});
       }},
      {"one_cycle_three",
       [](Optimizer& o) {
         return std::make_unique<OneCycleLR>(o, OneCycleLROptions{.max_lr = 0.7,
                                                                  .total_steps = 21,
                                                                  .pct_start = 0.4,
                                                                  .anneal_strategy = AnnealStrategy::linear,
                                                                  .base_momentum = 0.6,
                                                                  .max_momentum = 0.8,
                                                                  .div_factor = 10,
                                                                  .final_div_factor = 100,
                                                                  .three_phase = true});
       }},
      {"sequential",
       [](Optimizer& o) {
         const std::vector<std::shared_ptr<StepSchedule>> parts{
             std::make_shared<LinearLR>(o, LinearLROptions{.start_factor = 0.1, .total_iters = 4}),
             std::make_shared<ExponentialLR>(o, 0.8),
             std::make_shared<PolynomialLR>(o, PolynomialLROptions{.total_iters = 10})};
         return std::make_unique<SequentialLR>(o, parts, std::vector<int64_t>{5, 12});
       }},
  };
  return table;
}

SGD make_optimizer() {
  return SGD({{{zeros({1})}, {.lr = 0.4, .momentum = 0.5}}, {{zeros({1})}, {.lr = 0.8, .momentum = 0.5}}});
}

class ScheduleTest : public testing::TestWithParam<std::pair<const std::string, MakeSchedule>> {};

TEST_P(ScheduleTest, AgreesWithPyTorch) {
  const std::vector<double>& reference = kScheduleReference.at(GetParam().first);
  SGD optimizer = make_optimizer();
  const auto schedule = GetParam().second(optimizer);
  for (int step = 0; step <= kSteps; ++step) {
    EXPECT_NEAR(optimizer.lr(0), reference[static_cast<size_t>(step)], 1e-12) << step;
    EXPECT_NEAR(optimizer.options(1).momentum, reference[static_cast<size_t>(kSteps + 1 + step)], 1e-12) << step;
    EXPECT_EQ(schedule->steps(), step);
    if (step < kSteps) schedule->step();
  }
}

TEST_P(ScheduleTest, ResumesFromASavedState) {
  SGD straight = make_optimizer(), before = make_optimizer(), after = make_optimizer();
  after.set_lr(0.1);  // loading the state replaces the initial learning rates too
  const auto a = GetParam().second(straight), b = GetParam().second(before), c = GetParam().second(after);
  for (int step = 0; step < kSteps; ++step) a->step();
  for (int step = 0; step < 7; ++step) b->step();
  c->load_state_dict(b->state_dict());
  for (int step = 7; step < kSteps; ++step) c->step();
  EXPECT_EQ(after.lr(0), straight.lr(0));
  EXPECT_EQ(after.lr(1), straight.lr(1));
}

INSTANTIATE_TEST_SUITE_P(Schedules, ScheduleTest, testing::ValuesIn(schedules()),
                         [](const auto& test) { return test.param.first; });

double metric(int step) { return 1 + std::cos(0.9 * step) / (step + 1); }

const std::map<std::string, ReduceLROnPlateauOptions> kPlateaus{
    {"min", {.factor = 0.5, .patience = 2, .threshold = 0.01}},
    {"max_abs",
     {.mode = PlateauMode::max,
      .factor = 0.3,
      .patience = 1,
      .threshold = 0.05,
      .threshold_mode = ThresholdMode::absolute,
      .cooldown = 2,
      .min_lr = 0.02}},
};

TEST(Plateau, AgreesWithPyTorchAndResumes) {
  for (const auto& [name, options] : kPlateaus) {
    const std::vector<double>& reference = kPlateauReference.at(name);
    SGD optimizer({zeros({1})}, {.lr = 0.4});
    auto schedule = std::make_unique<ReduceLROnPlateau>(optimizer, options);
    for (int step = 0; step < kSteps; ++step) {
      if (step % 5 == 2) {  // resume from the state with a new schedule
        const TensorMap state = schedule->state_dict();
        schedule = std::make_unique<ReduceLROnPlateau>(optimizer, options);
        schedule->load_state_dict(state);
      }
      schedule->step(metric(step));
      EXPECT_NEAR(optimizer.lr(), reference[static_cast<size_t>(step)], 1e-12) << name << ' ' << step;
    }
  }
}

TEST(Plateau, RelativeThresholdScalesWithTheBestMetric) {
  struct Case {
    PlateauMode mode;
    double best;
    double worse;   // not better than `best` by more than the threshold
    double better;  // better than `best` by more than the threshold
  };
  for (const Case& c : {Case{PlateauMode::min, -10, -10.5, -11.5}, Case{PlateauMode::min, 10, 9.5, 8.5},
                        Case{PlateauMode::max, -10, -9.5, -8.5}, Case{PlateauMode::max, 10, 10.5, 11.5},
                        Case{PlateauMode::min, 0, 0, -1e-9}}) {
    SGD optimizer({zeros({1})}, {.lr = 1});
    ReduceLROnPlateau schedule(optimizer, {.mode = c.mode, .patience = 1, .threshold = 0.1});
    for (const double metric : {c.best, c.worse, c.better}) schedule.step(metric);
    EXPECT_EQ(schedule.best(), c.better) << c.best;
    EXPECT_EQ(optimizer.lr(), 1) << c.best;
    for (int step = 0; step < 2; ++step) schedule.step(c.better);
    EXPECT_EQ(optimizer.lr(), 0.1) << c.best;
  }
}

TEST(Plateau, NanIsNotBetter) {
  SGD optimizer({zeros({1})}, {.lr = 1});
  ReduceLROnPlateau schedule(optimizer, {.patience = 0});
  schedule.step(5);
  schedule.step(std::nan(""));
  EXPECT_EQ(schedule.best(), 5);
  EXPECT_EQ(optimizer.lr(), 0.1);
}

TEST(Schedule, OneCycleChangesBeta1AndRejectsStepsAfterItsEnd) {
  Adam adam({zeros({1})});
  OneCycleLR schedule(adam, {.max_lr = 1, .total_steps = 10});
  EXPECT_EQ(adam.options().betas[0], 0.95);
  for (int step = 0; step < 2; ++step) schedule.step();
  EXPECT_NEAR(adam.options().betas[0], 0.85, 1e-12);
  EXPECT_NEAR(adam.lr(), 1, 1e-12);
  for (int step = 2; step < 10; ++step) schedule.step();
  EXPECT_NEAR(adam.lr(), 1 / 25e4, 1e-12);
  EXPECT_ERROR(schedule.step(), "OneCycleLR: step 11 exceeds total_steps = 10");
  Adagrad without({zeros({1})});
  EXPECT_ERROR(OneCycleLR(without, {.max_lr = 1, .total_steps = 2}), "Adagrad: has no momentum");
  EXPECT_EQ(OneCycleLR(without, {.max_lr = 1, .total_steps = 2, .cycle_momentum = false}).steps(), 0);
}

TEST(Schedule, ConstantAndWarmRestartsMatchFormulas) {
  SGD sgd({zeros({1})}, 0.5);
  ConstantLR constant(sgd, {.factor = 0.25, .total_iters = 3});
  for (int step = 0; step < 6; ++step, constant.step()) EXPECT_EQ(sgd.lr(), step < 3 ? 0.125 : 0.5) << step;

  const auto cosine = [](double share) { return 0.1 + 0.4 * (1 + std::cos(std::acos(-1) * share)) / 2; };
  sgd.set_lr(0.5);
  CosineAnnealingWarmRestarts equal(sgd, {.t_0 = 4, .eta_min = 0.1});
  for (int step = 0; step < 10; ++step, equal.step()) EXPECT_NEAR(sgd.lr(), cosine(step % 4 / 4.0), 1e-15) << step;
  sgd.set_lr(0.5);
  CosineAnnealingWarmRestarts longer(sgd, {.t_0 = 2, .t_mult = 3, .eta_min = 0.1});
  for (int step = 0; step < 30; ++step, longer.step()) {  // restarts at 2, 8 and 26
    const double share = step < 2    ? step / 2.0
                         : step < 8  ? (step - 2) / 6.0
                         : step < 26 ? (step - 8) / 18.0
                                     : (step - 26) / 54.0;
    EXPECT_NEAR(sgd.lr(), cosine(share), 1e-15) << step;
  }
  EXPECT_GT(longer.lr_at(int64_t{1} << 62, 0.5), 0.1);
}

TEST(Schedule, InitialRateIsTheLastRateSetByTheUser) {
  SGD sgd({zeros({1})}, 0.5);
  const ExponentialLR first(sgd, 0.5);
  const LinearLR second(sgd, {.start_factor = 0.5});
  EXPECT_EQ(sgd.lr(), 0.25);
  EXPECT_EQ(StepLR(sgd, {}).steps(), 0);
  EXPECT_EQ(sgd.lr(), 0.5);
  sgd.set_lr(3);
  const LinearLR third(sgd, {.start_factor = 0.5});
  EXPECT_EQ(sgd.lr(), 1.5);
}

TEST(Schedule, RejectsBadOptions) {
  SGD o({zeros({1})});
  EXPECT_ERROR(MultiStepLR(o, {.gamma = -1}), "MultiStepLR: gamma must be finite and at least 0");
  EXPECT_ERROR(ExponentialLR(o, -1), "ExponentialLR: gamma must be finite and at least 0");
  EXPECT_ERROR(PolynomialLR(o, {.total_iters = 0}), "PolynomialLR: total_iters must be finite and at least 1, got 0");
  EXPECT_ERROR(LambdaLR(o, nullptr), "LambdaLR: the function is empty");
  EXPECT_ERROR(LambdaLR(o, [](int64_t) { return -1.0; }), "LambdaLR: the learning rate must be finite and at least 0");
  EXPECT_ERROR(OneCycleLR(o, {.max_lr = 1}), "OneCycleLR: total_steps must be finite and at least 1, got 0");
  EXPECT_ERROR(OneCycleLR(o, {.max_lr = 1, .total_steps = 9, .pct_start = 2}), "OneCycleLR: pct_start must lie in");
  EXPECT_ERROR(SequentialLR(o, {}, {}),
               "SequentialLR: the number of schedules must be the number of milestones plus 1, got 0 and 0");
  EXPECT_ERROR(SequentialLR(o, {nullptr}, {}), "SequentialLR: a schedule is null");
  const auto step_lr = std::make_shared<StepLR>(o);
  EXPECT_ERROR(SequentialLR(o, {step_lr, step_lr}, {-1}), "SequentialLR: milestones must not be negative, got -1");
  EXPECT_ERROR(MultiStepLR(o, {.milestones = {3, -2}}), "MultiStepLR: milestones must not be negative, got -2");
  EXPECT_ERROR(OneCycleLR(o, {.max_lr = 1, .total_steps = 9, .div_factor = INFINITY}),
               "OneCycleLR: div_factor and final_div_factor must be positive and finite, got inf and 10000");
  EXPECT_ERROR(ConstantLR(o, {.factor = -1}), "ConstantLR: factor must lie in [0, 1], got -1");
  EXPECT_ERROR(ConstantLR(o, {.total_iters = 0}), "ConstantLR: total_iters must be finite and at least 1, got 0");
  EXPECT_ERROR(CosineAnnealingWarmRestarts(o), "CosineAnnealingWarmRestarts: t_0 must be finite and at least 1, got 0");
  EXPECT_ERROR(CosineAnnealingWarmRestarts(o, {.t_0 = 1, .t_mult = 0}), "t_mult must be finite and at least 1, got 0");
  EXPECT_ERROR(StepLR(o, {.step_size = 0}), "StepLR: step_size must be finite and at least 1, got 0");
  EXPECT_ERROR(StepLR(o, {.gamma = -1}), "StepLR: gamma must be finite and at least 0");
  EXPECT_ERROR(LinearLR(o, {.start_factor = -1}), "LinearLR: start_factor must lie in [0, 1], got -1");
  EXPECT_ERROR(LinearLR(o, {.end_factor = 2}), "LinearLR: end_factor must lie in [0, 1], got 2");
  EXPECT_ERROR(LinearLR(o, {.total_iters = 0}), "LinearLR: total_iters must be finite and at least 1");
  EXPECT_ERROR(CosineAnnealingLR(o, {}), "CosineAnnealingLR: t_max must be finite and at least 1, got 0");
  EXPECT_ERROR(CosineAnnealingLR(o, {.t_max = 5, .warmup_steps = -1}), "CosineAnnealingLR: warmup_steps");
  EXPECT_ERROR(CosineAnnealingLR(o, {.t_max = 5, .eta_min = std::nan("")}), "CosineAnnealingLR: eta_min");
  EXPECT_ERROR(ReduceLROnPlateau(o, {.factor = 1}), "ReduceLROnPlateau: factor must lie in [0, 1), got 1");
  EXPECT_ERROR(ReduceLROnPlateau(o, {.patience = -1}), "ReduceLROnPlateau: patience");
  EXPECT_ERROR(ReduceLROnPlateau(o, {.threshold = 1}), "ReduceLROnPlateau: a relative threshold must be below 1");
  EXPECT_EQ(o.lr(), 1e-3);
}

TEST(Schedule, AFailedStepChangesNothing) {
  SGD optimizer({{{zeros({1})}, {.lr = 1}}, {{zeros({1})}, {.lr = 1e10}}});
  StepLR schedule(optimizer, {.gamma = 1e300});
  EXPECT_ERROR(schedule.step(), "StepLR: the learning rate must be finite and at least 0, got inf");
  EXPECT_EQ(schedule.steps(), 0);
  EXPECT_EQ(optimizer.lr(0), 1);
  EXPECT_EQ(optimizer.lr(1), 1e10);
}

TEST(Schedule, RejectsStatesThatDoNotFit) {
  SGD one({zeros({1})}, {.lr = 1}), two = make_optimizer();
  StepLR schedule(one, {.step_size = 1}), wide(two, {.step_size = 1});
  LinearLR other(two);
  schedule.step();
  TensorMap state = schedule.state_dict();
  EXPECT_ERROR(other.load_state_dict(state), "LinearLR: this is not the state of a LinearLR");
  EXPECT_ERROR(wide.load_state_dict(state), "StepLR: the state must have 4 entries, got 3");
  state["steps"] = full({}, 9, {.dtype = i64});
  schedule.check_state_dict(state);
  EXPECT_EQ(schedule.steps(), 1);
  state["class.StepLR"] = zeros({}, {.dtype = i64});
  EXPECT_ERROR(schedule.load_state_dict(state), "StepLR: class.StepLR must be version 1, got 0");
  state["class.StepLR"] = ones({}, {.dtype = i64});
  state["initial_lr.0"] = ones({});
  EXPECT_ERROR(schedule.load_state_dict(state), "StepLR: initial_lr.0 must be a scalar f64, got [] f32");
  state["initial_lr.0"] = full({}, std::nan(""), {.dtype = f64});
  EXPECT_ERROR(schedule.load_state_dict(state), "StepLR: initial_lr.0 must not be NaN");
  state["initial_lr.0"] = ones({}, {.dtype = f64});
  state["steps"] = full({}, -1, {.dtype = i64});
  EXPECT_ERROR(schedule.load_state_dict(state), "StepLR: steps must lie in [0, 2^62], got -1");
  EXPECT_EQ(schedule.steps(), 1);
}

}  // namespace
}  // namespace voxgrad
