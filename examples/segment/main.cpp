// Segmentation by nnU-Net's recipe. The program trains a network on labeled volumes, predicts the labels of other
// volumes, and writes these labels, Dice coefficients and pictures.
//
//   segment                                     segments seven structures of a brain scan
//   segment --dataset Dataset004_Hippocampus    uses a folder in nnU-Net's layout
//   segment --resume                            continues a stopped run
//
// The brain scan is part of Debian's package mricron-data.
//
// Results are written to out/segment.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "examples/common/options.h"
#include "examples/common/output.h"
#include "examples/common/overlays.h"
#include "examples/common/plot.h"
#include "examples/common/profile.h"
#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/common/ranks.h"
#include "examples/segment/evaluate.h"
#include "examples/segment/report.h"
#include "examples/segment/train.h"

namespace {
namespace vg = voxgrad;
using namespace segment;

struct Options {
  std::string out = "out/segment";
  std::string device = "auto";
  std::string dataset;
  std::vector<std::string> images;
  std::vector<std::string> labels;
  bool resume = false;
  bool probabilities = false;
  bool benchmark = false;
  int gpus = 0;
  TrainOptions train;
};

/// Adds the options that select the data.
void add_data_options(CLI::App& app, Options& options) {
  auto* const dataset =
      app.add_option("--dataset", options.dataset,
                     "folder in nnU-Net's layout (dataset.json, imagesTr, labelsTr); validates on fold 0. The "
                     "dataset may be larger than memory: the program stores preprocessed cases uncompressed in the "
                     "subfolder preprocessed of --out and reads patches from these files")
          ->check(examples::not_empty());
  auto* const image =
      app.add_option(
             "--image", options.images,
             "NIfTI files to train on. The last file is used only for validation. If there is a single file, a few "
             "of its slices are used only for validation")
          ->check(examples::not_empty())
          ->excludes(dataset);
  auto* const label = app.add_option("--label", options.labels, "NIfTI files with class indices, one per --image")
                          ->check(examples::not_empty())
                          ->excludes(dataset);
  image->needs(label);
  label->needs(image);
}

/// Reads the command line. Returns -1 if the program should continue, otherwise its exit code.
int parse(int argc, char** argv, Options& options) {
  CLI::App app{"Segmentation of volumes with voxgrad"};
  add_data_options(app, options);
  app.add_flag("--benchmark", options.benchmark,
               "train on generated volumes and print the time of an epoch of 250 steps, with and without data loading");
  app.add_flag("--probabilities", options.probabilities, "also write the probabilities of the classes");
  examples::add_tensorboard_option(app, options.train.tensorboard);
  examples::StepProfiler::add_option(app, options.train.profile);
  app.add_option("--out", options.out, "folder for the results; only one run can use it at a time")
      ->check(examples::not_empty())
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")
      ->check(examples::device_name())
      ->capture_default_str();
  app.add_option("--gpus", options.gpus, "train on the first N GPUs, which share each batch")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--resume", options.resume, "continue from the checkpoint in --out");
  TrainOptions& train = options.train;
  int64_t patch = 0;
  app.add_option("--steps", train.steps, "optimizer steps (default: 900 on the CPU, 1500 on a GPU)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_option("--batch", train.batch, "patches per step (default: 1 on the CPU, 4 on a GPU)")
      ->check(CLI::Range(1, 1 << 10));
  app.add_option(
         "--patch", patch,
         "voxels along a patch's side (default: 64 on the CPU; on a GPU 80 for unet, 160 for resenc-l, otherwise 128)")
      ->check(CLI::Range(8, 512));
  app.add_option("--spacing", train.spacing,
                 "voxel spacing of the network's input in mm (default: 2 on the CPU, the median of the cases on a GPU)")
      ->check(examples::number_in(0.01, 100));
  app.add_option("--channels", train.channels,
                 "channels of the first stage (default: 32; for unet 8 on the CPU, 16 on a GPU)")
      ->check(CLI::Range(1, 320));
  auto* const network =
      app.add_option("--network", train.network,
                     "unet: nnU-Net's plain U-Net; resenc-m, resenc-l: U-Net with a residual encoder, by default with "
                     "patches of 128^3 (resenc-m) or 160^3 voxels (resenc-l) on a GPU; mednext-b, mednext-l: MedNeXt")
          ->check(CLI::IsMember({"unet", "resenc-m", "resenc-l", "mednext-b", "mednext-l"}))
          ->capture_default_str();
  app.add_option("--kernel-size", train.kernel_size, "kernel size of MedNeXt: 3 or 5")
      ->check(CLI::IsMember({3, 5}))
      ->capture_default_str();
  app.add_option("--upkern", train.upkern,
                 "model folder of a MedNeXt with kernel size 3; the training starts from its weights, with kernels "
                 "resized to --kernel-size")
      ->check(CLI::ExistingDirectory);
  app.add_option("--plans", train.plans, "plans.json of nnU-Net with the network, patch size and preprocessing")
      ->check(CLI::ExistingFile)
      ->excludes(network);
  app.add_flag("--recompute-activations", train.recompute,
               "recompute activations in the backward pass: less memory, slower");
  app.add_option("--optimizer", train.optimizer, "adamw, or sgd with Nesterov momentum 0.99")
      ->check(CLI::IsMember({"adamw", "sgd"}))
      ->capture_default_str();
  app.add_option("--lr", train.lr, "initial learning rate (default: 1e-2; 3e-3 for adamw on a GPU)")
      ->check(examples::number_in(1e-9, 10));
  app.add_option("--ema", train.ema, "decay of the moving average of the weights; 0: no average")
      ->check(examples::number_in(0, 0.99999))
      ->capture_default_str();
  app.add_option("--validate-every", train.validate_every, "steps between validations (default: a quarter of --steps)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_option("--patience", train.patience,
                 "stop training after this many validations without a better Dice; 0: never")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_flag("!--no-augmentation", train.augment, "train without data augmentation");
  examples::add_workers_option(app, train.workers);
  examples::Precision::add_option(app, train.precision, " (default: highest on the CPU, bf16 on a GPU)");
  app.add_option("--seed", train.seed, "seed of all random numbers")
      ->check(examples::whole_number())
      ->capture_default_str();
  try {
    app.parse(argc, argv);
    if (options.images.size() != options.labels.size())
      throw CLI::ValidationError(vg::concat("give one --label for each --image, got ", options.labels.size(),
                                            " --label and ", options.images.size(), " --image"));
    examples::check_gpu_options(options.gpus, options.device, !train.profile.empty());
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  train.patch = vg::Triple(patch);
  return -1;
}

Task task_of(const Options& options) {
  if (options.benchmark) return generated();
  if (!options.dataset.empty()) return dataset(options.dataset);
  return options.images.empty() ? brain() : files(options.images, options.labels);
}

/// Loads and predicts a case and writes the predicted labels to `out`. If the case has a label, computes the Dice and
/// writes a picture.
TestResult test(const Task& task, size_t number, const TrainResult& trained, const Options& options, vg::Device device,
                const std::filesystem::path& out) {
  const Case c = task.predicted[number].load();
  const std::string name = file_name(c.name);
  const auto [labels, probabilities] = predict(trained, c, options.train, device, options.probabilities);
  TestResult result{.name = c.name, .dice = {}, .baseline = {}};
  const auto save = [&](const std::string& file, const vg::Tensor& data) {
    vg::save_nifti(out / file, {data, c.geometry.spacing, c.geometry.affine, "segmented by voxgrad"});
  };
  save(name + ".nii.gz", labels);
  if (options.probabilities) save(name + "-probabilities.nii.gz", probabilities);
  if (!c.label.defined()) return result;
  const auto classes = std::ssize(task.classes);
  result.dice = dice(labels, c.label, classes, task.ignore_index);
  if (number < task.baseline.size()) result.baseline = dice(task.baseline[number], c.label, classes, task.ignore_index);
  examples::Overlays overlays{.image = c.image.select(0, 0), .labels = labels, .truth = c.label, .names = {}};
  for (int64_t i = 1; i < classes; ++i) overlays.names.emplace_back(i, task.classes[static_cast<size_t>(i)]);
  overlays.centered = task.scored;
  overlays.ignore_index = task.ignore_index;
  examples::write_overlays(out / (name + ".png"), overlays);
  return result;
}

void write_results(const std::filesystem::path& out, const Task& task, const TrainOptions& options,
                   const TrainResult& trained, const std::vector<TestResult>& tests, const std::string& device) {
  examples::Curve loss{"training loss (Dice + cross-entropy)", {}, false},
      dice{"mean Dice of the validation data: " + task.validated_on, {}, false};
  for (size_t i = 0; i < trained.history.losses.size(); ++i)
    loss.points.push_back({static_cast<double>(i + 1), trained.history.losses[i]});
  for (const auto& [step, value] : trained.history.dice) dice.points.push_back({static_cast<double>(step), value});
  examples::write_curves(out / "curves.png", std::array{loss, dice});
  const bool mirrored = task.augment.mirror_p > 0 && options.augment;
  const vg::Axes mirror_axes = mirrored ? vg::Axes{0, 1, 2} : vg::Axes{};
  nnunet::save_model(out / "model", trained.plan, trained.network, mirror_axes, std::ssize(task.training));
  write_report(out / "report.md", task, trained, tests, device);
}

int run(const Options& options) {
  if (options.gpus > 0) vg::distributed::set_environment();
  const vg::Device device = examples::device_of(options.device);
  vg::runtime(device).require(device.index);
  Options settled = options;
  if (options.benchmark && options.train.steps == 0) settled.train.steps = 250;
  settled.train = settle(settled.train, device);
  if (settled.train.workers < 0) settled.train.workers = examples::default_workers(device, options.gpus);
  examples::check_gpus("segment", options.gpus, settled.train.batch);
  const Task task = task_of(options);
  const examples::OutputFolder folder(options.out);
  const std::filesystem::path& out = folder.path();
  for (const char* name : {"checkpoint.safetensors", "history.csv", "curves.png", "report.md"})
    folder.check_writable(name);  // fail before the training, not after it
  const std::string precision = examples::Precision(settled.train.precision).text(device);
  std::printf("%s: training on %zu %s, validating on %s, in %s\n", task.name.c_str(), task.training.size(),
              task.training.size() == 1 ? "case" : "cases", task.validated_on.c_str(), precision.c_str());
  if (options.benchmark) {
    const EpochTimes times = measure_epoch(task, settled.train, device, out);
    std::printf("epoch of 250 steps: %.2f s; without data loading and augmentation: %.2f s\n", times.total,
                times.without_loading);
    return 0;
  }

  const TrainResult trained = examples::train_on(options.gpus, [&](vg::distributed::Communicator* world) {
    return train(task, settled.train, world ? world->device() : device, out, options.resume, world);
  });
  if (trained.interrupted) return examples::report_stop(trained.steps, out / "checkpoint.safetensors");
  std::vector<TestResult> tests;
  for (size_t i = 0; i < task.predicted.size(); ++i) {
    tests.push_back(test(task, i, trained, settled, device, out));
    if (!tests.back().dice.empty())
      std::printf("%s\n%s\n", title(task, tests.back()).c_str(), dice_table(task, tests.back()).c_str());
  }
  write_results(out, task, settled.train, trained, tests, vg::concat(device, " in ", precision));
  std::printf("trained in %s; report, pictures, labels and checkpoint are in %s\n",
              examples::clock_text(trained.seconds).c_str(), out.string().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("segment", argc, argv, parse, run); }
