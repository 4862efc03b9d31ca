#include "examples/segment/train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "examples/common/interrupt.h"
#include "examples/common/options.h"
#include "examples/common/profile.h"
#include "examples/common/progress.h"
#include "examples/segment/evaluate.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// Everything that changes while training.
struct Run {
  Run(const std::vector<Case>& cases, const TrainOptions& o, const vg::nn::UNetPlan& plan, vg::Device device)
      : patches(sources(cases), {.size = vg::Shape{plan.patch_size[0], plan.patch_size[1], plan.patch_size[2]},
                                 .samples = o.steps * o.batch,
                                 .batch_size = o.batch}),
        loader(patches, {.batch_size = o.batch, .num_workers = static_cast<int>(o.workers), .seed = o.seed}),
        model(std::make_shared<vg::nn::UNet>(plan.network)),
        precision(o.precision),
        scaler(precision.scaler()) {
    model->to(device);
    if (device.is_cuda()) model->to(vg::MemoryFormat::channels_last);
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

  static std::vector<vg::data::PatchSource> sources(const std::vector<Case>& cases) {
    std::vector<vg::data::PatchSource> all;
    for (const Case& of : cases) all.push_back(vg::data::patch_source(of));
    return all;
  }

  vg::data::PatchDataset patches;
  vg::data::Loader loader;
  std::shared_ptr<vg::nn::UNet> model;
  std::unique_ptr<vg::optim::Optimizer> optimizer;
  std::unique_ptr<vg::optim::PolynomialLR> schedule;
  std::unique_ptr<vg::optim::ExponentialMovingAverage> average;
  examples::Precision precision;
  vg::optim::GradScaler scaler;
};

vg::data::AugmentOptions augmentation(const Task& task) {
  vg::data::AugmentOptions options;
  if (!task.mirror) options.mirror_p = 0;
  return options;
}

/// What a checkpoint must have in common with the run that goes on from it.
vg::Metadata describe_run(const Task& task, const TrainOptions& o, const vg::Triple& patch) {
  const auto text = [](const auto& value) { return vg::concat(value); };
  double sum = 0;
  for (const Case& c : task.training) sum += c.image.to(vg::f64).sum().item();
  return {{"cases", vg::concat(task.training.size(), " with sum ", sum)},
          {"steps", text(o.steps)},
          {"batch", text(o.batch)},
          {"channels", text(o.channels)},
          {"patch", text(patch)},
          {"spacing", text(o.spacing)},
          {"residual", text(o.residual)},
          {"optimizer", o.optimizer},
          {"lr", text(o.lr)},
          {"ema", text(o.ema)},
          {"seed", text(o.seed)},
          {"augmentation", text(o.augment)},
          {"precision", o.precision}};
}

void check_same_run(const vg::Metadata& saved, const vg::Metadata& wanted) {
  for (const auto& [key, value] : wanted) {
    const auto found = saved.find(key);
    const std::string was = found == saved.end() ? "nothing" : found->second;
    vg::check(was == value, "segment", "--resume: the checkpoint was made with ", key, " ", was, ", now it is ", value);
  }
}

class Training {
 public:
  Training(const Task& task, const TrainOptions& options, vg::Device device, std::filesystem::path out)
      : task_(task),
        options_(options),
        device_(device),
        out_(std::move(out)),
        preprocess_(choose_preprocessing(task, options.spacing, options.seed)),
        cases_(preprocessed(task.training, preprocess_)),
        plan_(plan_network(task, options)),
        run_(cases_, options, plan_, device),
        about_(describe_run(task, options, plan_.patch_size)),
        augment_(augmentation(task)) {
    run_.precision.set_float32();
    result_.model = run_.model;
    result_.window = plan_.patch_size;
    result_.preprocess = preprocess_;
  }

  void resume() {
    vg::Metadata saved;
    vg::load_safetensors(checkpoint(), vg::Device::cpu(), &saved);
    check_same_run(saved, about_);
    vg::load_checkpoint(checkpoint(), run_.parts());
    result_.steps = run_.schedule->steps();
    result_.history = read_history(out_ / "history.csv", result_.steps);
    earlier_seconds_ = std::strtod(saved.at("seconds").c_str(), nullptr);
  }

  TrainResult run() {
    if (!options_.tensorboard.empty())
      result_.writer = std::make_shared<vg::SummaryWriter>(options_.tensorboard, result_.steps + 1);
    const examples::InterruptGuard interrupt;
    examples::Progress progress(result_.steps, options_.steps, "step");
    examples::StepProfiler profiler(options_.profile);
    if (result_.steps < options_.steps)
      for (const vg::data::Sample& batch : run_.loader) {
        profiler.begin_step();
        const double loss = step(batch);
        vg::check(std::isfinite(loss), "segment", "the loss of step ", result_.steps, " is not finite; a smaller --lr ",
                  "may help");
        result_.history.losses.push_back(loss);
        if (result_.writer) result_.writer->add_scalar("loss", loss, result_.steps);
        const bool last = result_.steps == options_.steps;
        if (result_.steps % options_.validate_every == 0 || last) validate();
        progress.update(result_.steps, figure());
        if (last || interrupt.requested() || gave_up()) break;
        if (result_.steps % options_.validate_every == 0) save(progress.seconds());
      }
    profiler.finish();
    save(progress.seconds());
    result_.interrupted = interrupt.requested();
    if (run_.average) run_.average->apply_to(*run_.model);
    return std::move(result_);
  }

 private:
  static std::vector<Case> preprocessed(std::vector<Case> cases, const Preprocessing& preprocess) {
    for (Case& of : cases) of = preprocess(of);
    return cases;
  }
  /// For patches no larger than the cases are.
  vg::nn::UNetPlan plan_network(const Task& task, const TrainOptions& options) const {
    vg::Triple largest = 1;
    for (const Case& of : cases_)
      for (int64_t a = 0; a < 3; ++a) largest[a] = std::max(largest[a], of.image.size(a + 1));
    vg::Triple patch = options.patch;
    for (int64_t a = 0; a < 3; ++a) patch[a] = std::min(patch[a], largest[a]);
    vg::nn::UNetPlan plan = vg::nn::plan_unet(patch, preprocess_.spacing,
                                              {.in_channels = task.training[0].image.size(0),
                                               .num_classes = std::ssize(task.classes),
                                               .residual = options.residual,
                                               .base_features = options.channels});
    plan.network.checkpoint = options.checkpointing;
    return plan;
  }
  std::filesystem::path checkpoint() const { return out_ / "checkpoint.safetensors"; }

  /// One step on a batch of patches. Returns its loss.
  double step(const vg::data::Sample& raw) {
    vg::Generator random(options_.seed + static_cast<uint64_t>(result_.steps));  // so that a resumed run draws the same
    vg::data::Sample batch{raw.input.to(device_), raw.target.to(device_)};
    if (options_.augment) batch = augment_(batch, random);
    if (device_.is_cuda()) batch.input = batch.input.contiguous(vg::MemoryFormat::channels_last);
    vg::Tensor loss;
    {
      const vg::autocast guard = run_.precision.autocast();
      loss = vg::deep_supervision_loss(run_.model->levels(batch.input), batch.target,
                                       {.dice = {.batch = true, .include_background = false}});
    }
    run_.optimizer->zero_grad();
    run_.scaler.scale(loss).backward();
    run_.scaler.unscale_(*run_.optimizer);
    vg::optim::clip_grad_norm_(run_.model->parameters(), 12);
    run_.scaler.step(*run_.optimizer);
    run_.scaler.update();
    run_.schedule->step();
    if (run_.average) run_.average->update();
    ++result_.steps;
    return loss.item();
  }

  /// Mean Dice of the validation's cases, with the averaged weights.
  void validate() {
    if (!run_.average) return validate_weights();
    const auto averaged = run_.average->swap();
    validate_weights();
  }
  void validate_weights() {
    double sum = 0;
    for (const Case& of : task_.validation)
      sum += mean_dice(dice(labels_of(predict(result_, of, options_, device_)), of.label, std::ssize(task_.classes)),
                       task_.scored);
    result_.history.dice.emplace_back(result_.steps, sum / static_cast<double>(task_.validation.size()));
    if (result_.writer) result_.writer->add_scalar("Dice", result_.history.dice.back().second, result_.steps);
  }
  /// Whether the last validations brought nothing.
  bool gave_up() const {
    const auto& dice = result_.history.dice;
    if (options_.patience == 0 || dice.empty()) return false;
    const auto best = std::ranges::max_element(dice, {}, &std::pair<int64_t, double>::second);
    return dice.end() - best > options_.patience;
  }

  std::string figure() const {
    const History& history = result_.history;
    std::string text = vg::concat("loss ", fixed(history.recent_loss(), 3));
    if (!history.dice.empty()) text += vg::concat(", Dice ", fixed(history.dice.back().second, 3));
    return text;
  }

  void save(double seconds) {
    result_.seconds = earlier_seconds_ + seconds;
    about_["seconds"] = vg::concat(result_.seconds);
    write_history(out_ / "history.csv", result_.history);
    vg::save_checkpoint(checkpoint(), run_.parts(), about_);
  }

  const Task& task_;
  const TrainOptions options_;
  const vg::Device device_;
  const std::filesystem::path out_;
  const Preprocessing preprocess_;
  const std::vector<Case> cases_;  // to train on, preprocessed
  const vg::nn::UNetPlan plan_;
  Run run_;
  vg::Metadata about_;
  const vg::data::Augmentation augment_;
  TrainResult result_;
  double earlier_seconds_ = 0;
};

}  // namespace

TrainOptions settle(TrainOptions o, vg::Device device) {
  const bool gpu = device.is_cuda();
  if (o.steps == 0) o.steps = gpu ? 1500 : 600;
  if (o.batch == 0) o.batch = gpu ? 4 : 1;
  if (o.channels == 0) o.channels = gpu ? 16 : 8;
  if (o.patch[0] == 0) o.patch = 64;
  if (o.spacing == 0 && !gpu) o.spacing = 2;
  if (o.lr == 0) o.lr = o.optimizer == "sgd" || !gpu ? 1e-2 : 3e-3;
  if (o.validate_every == 0) o.validate_every = std::max<int64_t>(o.steps / 4, 1);
  return o;
}

TrainResult train(const Task& task, const TrainOptions& options, vg::Device device, const std::filesystem::path& out,
                  bool resume) {
  vg::manual_seed(options.seed);
  Training training(task, options, device, out);
  if (resume) training.resume();
  return training.run();
}

vg::NiftiImage predict(const TrainResult& trained, const Case& of, const TrainOptions& options, vg::Device device) {
  const Case seen = trained.preprocess(of);
  const vg::nn::SlidingWindowOptions windows{.window = trained.window, .device = device, .accumulate = device};
  const examples::Precision precision(options.precision);
  const auto logits = [&](const vg::Tensor& patches) {
    const vg::autocast guard = precision.autocast();
    return (*trained.model)(patches);
  };
  const vg::Tensor found = vg::nn::sliding_window_inference(seen.image.unsqueeze(0), logits, windows);
  return vg::data::restore(vg::softmax(found, 1).squeeze(0).to(vg::Device::cpu()), seen);
}

vg::Tensor labels_of(const vg::NiftiImage& probabilities) { return vg::argmax(probabilities.data, 0).to(vg::u8); }

}  // namespace segment
