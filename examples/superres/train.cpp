// Implements the training on random patches.
#include "examples/superres/train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <vector>

#include "examples/common/checkpoint.h"
#include "examples/common/interrupt.h"
#include "examples/common/options.h"
#include "examples/common/profile.h"
#include "examples/common/progress.h"
#include "examples/common/ranks.h"
#include "examples/superres/report.h"
#include "examples/superres/volume.h"

namespace superres {
namespace vg = voxgrad;
namespace {

/// A dataset of random cubes from `head`, with `side` voxels per side. A sample consists of a cube (target) and the
/// same cube at half the resolution (input). The axes of a cube are permuted and mirrored at random. A cube that
/// contains mostly air is replaced by another random cube, up to 15 times.
class Patches : public vg::data::Dataset {
 public:
  Patches(vg::Tensor head, int64_t side, int64_t count) : head_(std::move(head)), side_(side), count_(count) {
    for (int64_t axis = 0; axis < 3; ++axis)
      vg::check(head_.size(axis) >= side_, "superres", "patches of ", side_,
                " voxels per side do not fit into the training part ", head_.shape());
  }

  int64_t size() const override { return count_; }

  vg::data::Sample get(int64_t, vg::Generator& random) const override {
    constexpr double kMinMean = 0.05;
    constexpr int kTries = 16;
    vg::Tensor cube = cut(random);
    for (int i = 1; i < kTries && cube.mean().item() < kMinMean; ++i) cube = cut(random);
    const std::vector<int64_t> order = vg::randperm(3, &random).to_vector<int64_t>();
    cube = cube.permute(vg::Dims(order));
    vg::Dims mirrored;
    for (int64_t axis = 0; axis < 3; ++axis)
      if (random.next_below(2) == 1) mirrored.push_back(axis);
    cube = vg::flip(cube, mirrored).contiguous().unsqueeze(0);
    return {low_resolution(cube.unsqueeze(0)).squeeze(0), cube};
  }

 private:
  vg::Tensor cut(vg::Generator& random) const {
    vg::Tensor cube = head_;
    for (int64_t axis = 0; axis < 3; ++axis)
      cube = cube.narrow(axis, random.next_below(head_.size(axis) - side_ + 1), side_);
    return cube.contiguous();
  }

  vg::Tensor head_;
  int64_t side_;
  int64_t count_;
};

/// Returns the settings that a checkpoint and the run that resumes from it must share.
vg::Metadata describe_run(const vg::Tensor& head, const TrainOptions& o) {
  const auto text = [](const auto& value) { return vg::concat(value); };
  return {{"volume", vg::concat(head.shape(), " sum ", head.to(vg::f64).sum().item())},
          {"steps", text(o.steps)},
          {"batch", text(o.batch)},
          {"patch", text(o.patch)},
          {"lr", text(o.lr)},
          {"seed", text(o.seed)},
          {"precision", o.precision},
          {"channels", text(o.model.channels)},
          {"layers", text(o.model.layers)}};
}

/// Reads the losses of the first `steps` steps, for a run that resumes after these steps.
std::vector<LossLine> earlier_losses(const std::filesystem::path& path, int64_t steps) {
  std::vector<LossLine> losses = read_losses(path);
  std::erase_if(losses, [&](const LossLine& line) { return line.step > steps; });
  if (std::ssize(losses) < steps)
    std::fprintf(stderr,
                 "superres: %s holds the losses of %lld of the %lld steps of the checkpoint; the others are lost\n",
                 path.c_str(), static_cast<long long>(std::ssize(losses)), static_cast<long long>(steps));
  return losses;
}

/// Returns the mean of the last 20 losses. Single losses vary too much from batch to batch.
double recent_loss(const std::vector<LossLine>& losses) {
  const size_t count = std::min<size_t>(losses.size(), 20);
  double sum = 0;
  for (size_t i = losses.size() - count; i < losses.size(); ++i) sum += losses[i].loss;
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

/// The losses and learning rates of the steps. The loss of a step is added when StepReports returns the report of this
/// step. The next step may have begun by then.
class LossHistory {
 public:
  void begin_step(int64_t step, double lr) { unreported_.push_back({step, 0, lr}); }

  /// Adds the losses of reports, which must be in the order of the steps. Returns true if a step was interrupted.
  /// Throws voxgrad::Error if a loss is not finite.
  bool record(const std::vector<examples::StepReport>& reports, vg::SummaryWriter* writer) {
    bool any_interrupted = false;
    for (const auto& [loss, interrupted] : reports) {
      LossLine line = unreported_.front();
      unreported_.pop_front();
      line.loss = loss;
      vg::check(std::isfinite(loss), "superres", "the loss of step ", line.step,
                " is not finite; a smaller --lr may help");
      lines.push_back(line);
      any_interrupted = any_interrupted || interrupted;
      if (!writer) continue;
      writer->add_scalar("loss", loss, line.step);
      writer->add_scalar("learning rate", line.lr, line.step);
    }
    return any_interrupted;
  }

  std::vector<LossLine> lines;  // steps whose loss is known

 private:
  std::deque<LossLine> unreported_;  // steps whose loss StepReports has not returned yet
};

/// The objects whose state changes during training.
struct Run {
  Run(const vg::Tensor& head, const TrainOptions& o, vg::Device device, vg::distributed::Communicator* world)
      : patches(head, 2 * o.patch, o.steps * o.batch),
        loader(patches, {.batch_size = o.batch / (world ? world->size() : 1),
                         .num_workers = static_cast<int>(o.workers),
                         .seed = o.seed,
                         .device = device,
                         .sampler = examples::make_sampler(o.steps * o.batch, o.batch, world)}),
        model(std::make_shared<SuperResolution>(o.model)),
        precision(o.precision),
        scaler(precision.scaler()) {
    model->to(device);
    if (world) parallel = std::make_unique<vg::nn::DataParallel>(*model, *world);
    optimizer = std::make_unique<vg::optim::AdamW>(model->parameters(),
                                                   vg::optim::AdamWOptions{.lr = o.lr, .betas = {0.9, 0.99}});
    const int64_t warmup = std::min<int64_t>(20, o.steps / 2);
    schedule = std::make_unique<vg::optim::CosineAnnealingLR>(
        *optimizer, vg::optim::CosineAnnealingLROptions{.t_max = o.steps - warmup, .warmup_steps = warmup});
  }
  vg::CheckpointParts parts() {
    return {.model = model.get(),
            .optimizer = optimizer.get(),
            .schedule = schedule.get(),
            .loader = &loader,
            .scaler = scaler.is_enabled() ? &scaler : nullptr};
  }

  Patches patches;
  vg::data::Loader loader;
  std::shared_ptr<SuperResolution> model;
  std::unique_ptr<vg::nn::DataParallel> parallel;  // null if `world` is null
  std::unique_ptr<vg::optim::AdamW> optimizer;
  std::unique_ptr<vg::optim::CosineAnnealingLR> schedule;
  examples::Precision precision;
  vg::optim::GradScaler scaler;
};

/// Runs training steps. With `capture`, only the first step runs eagerly, because it allocates the optimizer's state;
/// all later steps are replays of a CUDA graph.
class Stepper {
 public:
  Stepper(Run& run, vg::Device device, bool capture) : run_(run), device_(device), capture_(capture) {}

  /// Runs a step on a batch. Returns the loss, which the next step may overwrite.
  vg::Tensor step(const vg::Tensor& low, const vg::Tensor& high) {
    if (graph_) {
      low_.copy_(low);
      high_.copy_(high);
      graph_->replay();
      return loss_;
    }
    low_ = low;
    high_ = high;
    run_eagerly();
    const vg::Tensor loss = loss_;
    if (capture_) graph_.emplace(device_.index).capture([this] { run_eagerly(); });
    return loss;
  }

 private:
  void run_eagerly() {
    {
      const vg::autocast guard = run_.precision.autocast();
      loss_ = vg::mse_loss((*run_.model)(low_), high_);
    }
    run_.optimizer->zero_grad();
    run_.scaler.scale(loss_).backward();
    run_.scaler.step(*run_.optimizer);
    run_.scaler.update();
  }

  Run& run_;
  vg::Device device_;
  bool capture_;
  vg::Tensor low_, high_;  // input of the CUDA graph
  vg::Tensor loss_;        // output of the CUDA graph
  std::optional<vg::cuda::CUDAGraph> graph_;
};

}  // namespace

TrainResult train(const vg::Tensor& head, const TrainOptions& options, vg::Device device,
                  const std::filesystem::path& out, bool resume, vg::distributed::Communicator* world) {
  vg::manual_seed(options.seed);
  const bool first = !world || world->rank() == 0;  // rank 0 writes files, prints and handles Ctrl-C
  Run run(head, options, device, world);
  run.precision.set_float32();
  vg::Metadata metadata = describe_run(head, options);
  const std::filesystem::path checkpoint = out / "checkpoint.safetensors", losses_file = out / "losses.csv";
  LossHistory losses;
  double earlier_seconds = 0;
  if (resume) {
    vg::Metadata saved;
    vg::load_safetensors(checkpoint, vg::Device::cpu(), &saved);
    examples::check_same_run("superres", saved, metadata);
    vg::load_checkpoint(checkpoint, run.parts());
    if (first) losses.lines = earlier_losses(losses_file, run.schedule->steps());
    earlier_seconds = std::strtod(saved["seconds"].c_str(), nullptr);
  }

  TrainResult result{.model = run.model,
                     .writer = nullptr,
                     .steps = run.schedule->steps(),
                     .seconds = earlier_seconds,
                     .last_loss = recent_loss(losses.lines)};
  if (first && !options.tensorboard.empty())
    result.writer = std::make_shared<vg::SummaryWriter>(options.tensorboard, result.steps + 1);
  if (result.steps >= options.steps) {
    if (first) std::printf("the checkpoint already has all %lld steps\n", static_cast<long long>(options.steps));
    return result;
  }
  constexpr int64_t kSaveEvery = 200;
  Stepper stepper(run, device,
                  device.is_cuda() && options.profile.empty());  // the profiler cannot record operators in a replay
  std::optional<examples::InterruptGuard> interrupt;
  if (first) interrupt.emplace();
  examples::Progress progress(result.steps, options.steps, "step");
  const auto save = [&] {
    if (!first) return;
    result.seconds = earlier_seconds + progress.seconds();
    metadata["seconds"] = vg::concat(result.seconds);
    write_losses(losses_file, losses.lines);
    vg::save_checkpoint(checkpoint, run.parts(), metadata);
  };
  examples::StepProfiler profiler(first ? options.profile : std::string());
  examples::StepReports reports(device, world);
  for (const auto& [low, high] : run.loader) {
    profiler.begin_step();
    losses.begin_step(++result.steps, run.optimizer->lr());
    const vg::Tensor loss = stepper.step(low, high);
    run.schedule->step();
    const bool save_now = result.steps % kSaveEvery == 0;
    const auto new_reports =
        reports.add(loss, first && interrupt->requested(), save_now || result.steps == options.steps);
    result.interrupted = losses.record(new_reports, result.writer.get());
    char figure[48];
    std::snprintf(figure, sizeof figure, "loss %.3e%s%s", recent_loss(losses.lines), run.precision.half() ? " in " : "",
                  run.precision.half() ? options.precision.c_str() : "");
    if (first && !losses.lines.empty()) progress.update(result.steps, figure);
    if (result.interrupted) break;
    if (save_now) save();
  }
  losses.record(reports.finish(), result.writer.get());
  save();
  profiler.finish();
  result.last_loss = recent_loss(losses.lines);
  return result;
}

}  // namespace superres
