// Implements the training with its validation and its checkpoints, and measures the time of an epoch.
#include "examples/segment/train.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "examples/common/checkpoint.h"
#include "examples/common/interrupt.h"
#include "examples/common/options.h"
#include "examples/common/profile.h"
#include "examples/common/progress.h"
#include "examples/common/ranks.h"
#include "examples/nnunet/pipeline.h"
#include "examples/nnunet/plan.h"
#include "examples/segment/evaluate.h"
#include "examples/segment/store.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// The objects whose state changes during training.
struct Run {
  Run(const std::vector<vg::data::PatchSource>& sources, const TrainOptions& o, const nnunet::ModelPlan& plan,
      int64_t ignore_index, vg::Device device, vg::distributed::Communicator* world)
      : patches(sources, {.size = vg::Shape{plan.patch_size[0], plan.patch_size[1], plan.patch_size[2]},
                          .samples = o.steps * o.batch,
                          .batch_size = o.batch,
                          .ignore_index = ignore_index}),
        loader(patches, {.batch_size = o.batch / (world ? world->size() : 1),
                         .num_workers = static_cast<int>(o.workers),
                         .seed = o.seed,
                         .device = device,
                         .sampler = examples::make_sampler(o.steps * o.batch, o.batch, world)}),
        network(nnunet::make_network(plan.network)),
        model(network.module),
        precision(o.precision),
        scaler(precision.scaler()) {
    model->to(device);
    if (device.is_cuda()) model->to(vg::MemoryFormat::channels_last);
    if (world) parallel = std::make_unique<vg::nn::DataParallel>(*model, *world);
    if (o.optimizer == "sgd")
      optimizer = std::make_unique<vg::optim::SGD>(
          model->parameters(),
          vg::optim::SgdOptions{.lr = o.lr, .momentum = 0.99, .weight_decay = 3e-5, .nesterov = true});
    else
      optimizer = std::make_unique<vg::optim::AdamW>(model->parameters(), vg::optim::AdamWOptions{.lr = o.lr});
    schedule = std::make_unique<vg::optim::PolynomialLR>(
        *optimizer, vg::optim::PolynomialLROptions{.total_iters = o.steps, .power = 0.9});
    if (o.ema > 0)
      average = std::make_unique<vg::optim::ExponentialMovingAverage>(
          *model, vg::optim::EmaOptions{.decay = o.ema, .warmup = 10});
  }
  vg::CheckpointParts parts() {
    return {.model = model.get(),
            .optimizer = optimizer.get(),
            .schedule = schedule.get(),
            .loader = &loader,
            .scaler = scaler.is_enabled() ? &scaler : nullptr,
            .average = average.get()};
  }

  vg::data::PatchDataset patches;
  vg::data::Loader loader;
  nnunet::Network network;
  std::shared_ptr<vg::nn::Layer> model;            // the module of `network`
  std::unique_ptr<vg::nn::DataParallel> parallel;  // null if there is only one rank
  std::unique_ptr<vg::optim::Optimizer> optimizer;
  std::unique_ptr<vg::optim::PolynomialLR> schedule;
  std::unique_ptr<vg::optim::ExponentialMovingAverage> average;  // null if TrainOptions::ema is 0
  examples::Precision precision;
  vg::optim::GradScaler scaler;
};

/// Returns the settings that a checkpoint and the run that resumes from it must share, except for the patch size.
vg::Metadata describe_run(const std::string& cases, const TrainOptions& o) {
  return {{"cases", cases},
          {"steps", vg::concat(o.steps)},
          {"batch", vg::concat(o.batch)},
          {"channels", vg::concat(o.channels)},
          {"spacing", vg::concat(o.spacing)},
          {"network", o.network},
          {"kernel size", vg::concat(o.kernel_size)},
          {"plans", o.plans},
          {"optimizer", o.optimizer},
          {"lr", vg::concat(o.lr)},
          {"ema", vg::concat(o.ema)},
          {"seed", vg::concat(o.seed)},
          {"augmentation", vg::concat(o.augment)},
          {"precision", o.precision}};
}

class Training {
 public:
  Training(const Task& task, const TrainOptions& options, vg::Device device, std::filesystem::path out, bool resume,
           vg::distributed::Communicator* world)
      : task_(task),
        world_(world),
        first_(!world || world->rank() == 0),
        options_(options),
        device_(device),
        out_(std::move(out)),
        survey_(survey(task, options.spacing, options.seed, options.plans)),
        metadata_(describe_run(survey_.cases, options)),
        sources_(sources(resume)),
        plan_(plan_network()),
        run_(sources_, options, plan_, task.ignore_index, device, world),
        augment_(in_voxels(task.augment, survey_.plan.spacing)) {
    run_.precision.set_float32();
    result_.network = run_.network;
    result_.plan = plan_;
    if (!options.upkern.empty() && !resume) start_from(options.upkern);
    metadata_["patch"] = vg::concat(plan_.patch_size);
    if (resume) load();
  }

  TrainResult run() {
    if (first_ && !options_.tensorboard.empty())
      result_.writer = std::make_shared<vg::SummaryWriter>(options_.tensorboard, result_.steps + 1);
    std::optional<examples::InterruptGuard> interrupt;
    if (first_) interrupt.emplace();
    examples::Progress progress(result_.steps, options_.steps, "step");
    examples::StepProfiler profiler(first_ ? options_.profile : std::string());
    examples::StepReports reports(device_, world_);
    if (result_.steps < options_.steps)
      for (const vg::data::Sample& batch : run_.loader) {
        profiler.begin_step();
        const vg::Tensor rank_loss = step(batch, options_.augment);
        const auto [loss, interrupted] = reports.add(rank_loss, first_ && interrupt->requested(), /*wait=*/true).back();
        result_.interrupted = interrupted;
        vg::check(std::isfinite(loss), "segment", "the loss of step ", result_.steps,
                  " is not finite; a smaller --lr may help");
        result_.history.losses.push_back(loss);
        if (result_.writer) result_.writer->add_scalar("training loss", loss, result_.steps);
        const bool last = result_.steps == options_.steps;
        if (result_.steps % options_.validate_every == 0 || last) {
          validate();
          if (!world_) result_.interrupted = interrupt->requested();
        }
        if (first_) progress.update(result_.steps, figure());
        if (last || result_.interrupted || stops_early()) break;
        if (result_.steps % options_.validate_every == 0) save(progress.seconds());
      }
    profiler.finish();
    save(progress.seconds());
    if (run_.average) run_.average->apply_to(*run_.model);
    return std::move(result_);
  }

  /// Returns the seconds of an epoch with data loading and augmentation, and of the same number of steps on one batch.
  /// Measured after kWarmUp warm-up steps, which options_.steps includes.
  EpochTimes measure() {
    const int64_t count = options_.steps - kWarmUp;
    const auto seconds = [&] {
      vg::synchronize(device_);
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    double start = 0;
    vg::data::Sample last;
    for (const vg::data::Sample& batch : run_.loader) {
      if (result_.steps == kWarmUp) start = seconds();
      step(batch, options_.augment);
      last = batch;
    }
    const double middle = seconds();
    for (int64_t i = 0; i < count; ++i) step(last, false);
    const double scale = 250 / static_cast<double>(count);
    return {(middle - start) * scale, (seconds() - middle) * scale};
  }

  static constexpr int64_t kWarmUp = 10;

 private:
  vg::Metadata check_saved() const {
    vg::Metadata saved;
    vg::load_safetensors(checkpoint(), vg::Device::cpu(), &saved);
    examples::check_same_run("segment", saved, metadata_);
    return saved;
  }
  void load() {
    const vg::Metadata saved = check_saved();
    vg::load_checkpoint(checkpoint(), run_.parts());
    result_.steps = run_.schedule->steps();
    result_.history = read_history(out_ / "history.csv", result_.steps);
    earlier_seconds_ = std::strtod(saved.at("seconds").c_str(), nullptr);
  }

  /// Returns the preprocessed training cases. With `resume`, first checks that the checkpoint was written with the same
  /// options, so that an error leaves all files unchanged.
  std::vector<vg::data::PatchSource> sources(bool resume) const {
    if (resume) check_saved();
    if (!task_.in_memory) {
      if (!first_) world_->barrier();  // wait until rank 0 has written the files
      auto stored = store(task_, survey_, out_ / "preprocessed", resume || !first_);
      if (first_ && world_) world_->barrier();
      return stored;
    }
    std::vector<vg::data::PatchSource> all;
    for (const LazyCase& lazy : task_.training) {
      const nnunet::TrainingVolume ready = nnunet::prepare_for_training(lazy.load(), survey_.plan);
      all.push_back(vg::data::patch_source(ready.image, ready.label));
    }
    return all;
  }
  /// Completes the plan of the survey: selects the network and the patch size. The patches have options_.patch voxels,
  /// or fewer along an axis on which all cases are shorter, rounded up to a size that the network accepts.
  nnunet::ModelPlan plan_network() const {
    nnunet::ModelPlan plan = survey_.plan;
    if (!options_.plans.empty()) {  // the plans contain the network and the patch size
      std::visit([&](auto& network) { network.recompute = options_.recompute; }, plan.network);
      return plan;
    }
    vg::Triple largest = 1;
    for (const vg::data::PatchSource& source : sources_)
      for (int64_t a = 0; a < 3; ++a) largest[a] = std::max(largest[a], source.shape[a]);
    vg::Triple patch = options_.patch;
    for (int64_t a = 0; a < 3; ++a) patch[a] = std::min(patch[a], largest[a]);
    if (options_.network.starts_with("mednext")) {
      nnunet::MedNeXtOptions mednext = nnunet::mednext_preset(options_.network == "mednext-l");
      mednext.in_channels = std::ssize(task_.channels);
      mednext.num_classes = std::ssize(task_.classes);
      mednext.channels = options_.channels;
      mednext.kernel_size = options_.kernel_size;
      mednext.recompute = options_.recompute;
      plan.network = mednext;
      constexpr int64_t kStride = 16;  // total stride of the network
      for (int64_t a = 0; a < 3; ++a) plan.patch_size[a] = (patch[a] + kStride - 1) / kStride * kStride;
      return plan;
    }
    nnunet::Plan unet = nnunet::plan_unet(patch, plan.spacing,
                                          {.in_channels = std::ssize(task_.channels),
                                           .num_classes = std::ssize(task_.classes),
                                           .residual = options_.network != "unet",
                                           .base_features = options_.channels});
    unet.network.recompute = options_.recompute;
    plan.network = unet.network;
    plan.patch_size = unet.patch_size;
    return plan;
  }
  /// Loads the weights from a model folder that `segment` wrote, and resizes their kernels to those of the network.
  void start_from(const std::filesystem::path& folder) {
    const std::filesystem::path file = folder / "fold_0/checkpoint_final.safetensors";
    run_.model->load_state_dict(nnunet::upkern(vg::load_safetensors(file), *run_.model));
  }
  std::filesystem::path checkpoint() const { return out_ / "checkpoint.safetensors"; }

  /// Runs a training step on a batch of patches and returns its loss. On a GPU, only the first step runs eagerly,
  /// because it allocates the optimizer's state; all later steps are replays of a CUDA graph, unless the steps are
  /// profiled.
  vg::Tensor step(vg::data::Sample batch, bool augment) {
    const uint64_t rank = world_ ? static_cast<uint64_t>(world_->rank()) << 32 : 0;
    // The seed depends on the step, so that a resumed run draws the same numbers.
    vg::Generator random(options_.seed + rank + static_cast<uint64_t>(result_.steps));
    if (augment) batch = augment_(batch, random);
    if (device_.is_cuda()) batch.input = batch.input.contiguous(vg::MemoryFormat::channels_last);
    if (graph_) {
      batch_.input.copy_(batch.input);
      batch_.target.copy_(batch.target);
      graph_->replay();
    } else {
      batch_ = batch;
      run_eagerly();
    }
    run_.schedule->step();
    if (run_.average) run_.average->update();
    ++result_.steps;
    const vg::Tensor loss = loss_;
    if (!graph_ && device_.is_cuda() && options_.profile.empty())  // the profiler cannot record operators in a replay
      graph_.emplace(device_.index).capture([this] { run_eagerly(); });
    return loss;
  }
  /// Runs the forward pass, the backward pass and the optimizer on batch_.
  void run_eagerly() {
    {
      const vg::autocast guard = run_.precision.autocast();
      loss_ = vg::deep_supervision_loss(
          run_.network.levels(batch_.input), batch_.target,
          {.dice = {.batch = true, .include_background = false, .ignore_index = task_.ignore_index}});
    }
    run_.optimizer->zero_grad();
    run_.scaler.scale(loss_).backward();
    run_.scaler.unscale_(*run_.optimizer);
    vg::optim::clip_grad_norm_(run_.model->parameters(), 12);
    run_.scaler.step(*run_.optimizer);
    run_.scaler.update();
  }

  /// Measures the mean Dice of the validation cases, with the averaged weights if there is an average.
  void validate() {
    if (!run_.average) return validate_weights();
    const auto averaged = run_.average->swap();
    validate_weights();
  }
  void validate_weights() {
    double sum = 0;
    for (const LazyCase& lazy : task_.validation) {
      const Case c = lazy.load();
      const vg::Tensor labels = predict(result_, c, options_, device_).labels;
      sum += mean_dice(dice(labels, c.label, std::ssize(task_.classes), task_.ignore_index), task_.scored);
    }
    result_.history.dice.emplace_back(result_.steps, sum / static_cast<double>(task_.validation.size()));
    if (result_.writer)
      result_.writer->add_scalar("validation Dice", result_.history.dice.back().second, result_.steps);
  }
  /// Returns true if none of the last `patience` validations reached a higher Dice than the validations before.
  bool stops_early() const {
    const auto& dice = result_.history.dice;
    if (options_.patience == 0 || dice.empty()) return false;
    const auto best = std::ranges::max_element(dice, {}, &std::pair<int64_t, double>::second);
    return dice.end() - best > options_.patience;
  }

  std::string figure() const {
    const History& history = result_.history;
    std::string text = vg::concat("training loss ", fixed(history.recent_loss(), 3));
    if (!history.dice.empty()) text += vg::concat(", validation Dice ", fixed(history.dice.back().second, 3));
    return text;
  }

  void save(double seconds) {
    if (!first_) return;
    result_.seconds = earlier_seconds_ + seconds;
    metadata_["seconds"] = vg::concat(result_.seconds);
    write_history(out_ / "history.csv", result_.history);
    vg::save_checkpoint(checkpoint(), run_.parts(), metadata_);
  }

  const Task& task_;
  vg::distributed::Communicator* const world_;
  const bool first_;  // true on rank 0, which writes files, prints and handles Ctrl-C
  const TrainOptions options_;
  const vg::Device device_;
  const std::filesystem::path out_;
  const Survey survey_;
  vg::Metadata metadata_;
  const std::vector<vg::data::PatchSource> sources_;
  const nnunet::ModelPlan plan_;
  Run run_;
  const vg::data::Augmentation augment_;
  vg::data::Sample batch_;                    // input of run_eagerly() and of the CUDA graph
  vg::Tensor loss_;                           // output of run_eagerly() and of the CUDA graph
  std::optional<vg::cuda::CUDAGraph> graph_;  // captured from run_eagerly()
  TrainResult result_;
  double earlier_seconds_ = 0;
};

}  // namespace

TrainOptions settle(TrainOptions o, vg::Device device) {
  const bool gpu = device.is_cuda();
  if (o.steps == 0) o.steps = gpu ? 1500 : 900;
  if (o.batch == 0) o.batch = gpu ? 4 : 1;
  const bool preset = o.network != "unet";
  if (o.channels == 0) o.channels = preset ? 32 : gpu ? 16 : 8;
  if (o.patch[0] == 0) o.patch = !gpu ? 64 : !preset ? 80 : o.network == "resenc-l" ? 160 : 128;
  if (o.spacing == 0 && !gpu) o.spacing = 2;
  if (o.lr == 0) o.lr = o.optimizer == "sgd" || !gpu ? 1e-2 : 3e-3;
  if (o.precision.empty()) o.precision = gpu ? "bf16" : "highest";
  if (o.validate_every == 0) o.validate_every = std::max<int64_t>(o.steps / 4, 1);
  return o;
}

EpochTimes measure_epoch(const Task& task, const TrainOptions& options, vg::Device device,
                         const std::filesystem::path& out) {
  TrainOptions longer = options;
  longer.steps += Training::kWarmUp;
  vg::manual_seed(options.seed);
  return Training(task, longer, device, out, false, nullptr).measure();
}

TrainResult train(const Task& task, const TrainOptions& options, vg::Device device, const std::filesystem::path& out,
                  bool resume, vg::distributed::Communicator* world) {
  vg::manual_seed(options.seed);
  return Training(task, options, device, out, resume, world).run();
}

}  // namespace segment
