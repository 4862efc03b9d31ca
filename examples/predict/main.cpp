// Segments volumes with a model that nnU-Net v2 or the program segment trained.
//
//   predict MODEL_FOLDER INPUT... OUTPUT
//   predict Dataset004/nnUNetTrainer__nnUNetPlans__3d_fullres imagesTs labels --folds 0 1 2 3 4
//
// MODEL_FOLDER contains dataset.json, plans.json and fold_0/checkpoint_final.pth. If the program segment wrote the
// folder, the checkpoint is fold_0/checkpoint_final.safetensors instead. The program predict reads these files without
// Python. INPUT is a folder, or one NIfTI file per channel.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <span>

#include "examples/common/options.h"
#include "examples/common/overlays.h"
#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/nnunet/pipeline.h"
#include "examples/predict/inputs.h"

namespace {
namespace vg = voxgrad;
namespace fs = std::filesystem;
using nnunet::Checkpoint;
using nnunet::ModelPlan;

struct Options {
  std::vector<std::string> paths;  // the model folder, the inputs, the output
  std::vector<std::string> folds;
  std::string checkpoint;
  std::string device = "auto";
  std::string precision;
  std::string intermediate;
  double step = 0.5;
  int threads = 0;
  bool mirroring = true;
  bool gaussian = true;
  bool probabilities = false;
  bool picture = false;
  bool half_accumulation = false;
};

/// Reads the command line. Returns the exit code if the program ends here, otherwise -1.
int parse(int argc, char** argv, Options& options) {
  CLI::App app{"Segments volumes with a model that nnU-Net v2 or the program segment trained"};
  app.add_option(
         "paths", options.paths,
         "MODEL_FOLDER: the folder of the model; INPUT: a folder with files CASE_0000.nii.gz, or one NIfTI file "
         "per channel; OUTPUT: the file or folder for the label maps")
      ->required()
      ->expected(3, 1 << 14)
      ->option_text("MODEL_FOLDER INPUT... OUTPUT");
  app.add_option("--folds", options.folds, "folds whose logits are averaged (default: all folds of the model folder)");
  app.add_option("--checkpoint", options.checkpoint,
                 "file name in the folders of the folds (default: the first of checkpoint_final.pth, "
                 "checkpoint_final.safetensors and checkpoint_best.pth that exists)");
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")
      ->check(examples::device_name())
      ->capture_default_str();
  examples::Precision::add_option(app, options.precision, "; default: highest on the CPU, f16 on a GPU");
  app.add_option("--step", options.step, "distance between neighboring windows as a fraction of their size")
      ->check(examples::number_in(0.01, 1))
      ->capture_default_str();
  app.add_flag("!--no-mirroring", options.mirroring, "do not average over mirrored windows; up to 8 times as fast");
  app.add_flag("!--no-gaussian", options.gaussian, "weight all voxels of a window equally");
  app.add_flag("--half-accumulation", options.half_accumulation,
               "round sums to f16 as nnU-Net does, to reproduce its labels exactly");
  app.add_flag("--probabilities", options.probabilities, "also write CASE_probabilities.nii.gz");
  app.add_flag("--picture", options.picture, "also write CASE.png: slices with the labels");
  app.add_option("--intermediate", options.intermediate,
                 "folder for CASE_preprocessed.npy and CASE_logits.npy: the network's input and the averaged logits")
      ->check(examples::not_empty());
  app.add_option("--threads", options.threads,
                 "number of CPU threads (default: VOXGRAD_NUM_THREADS, otherwise one per core)")
      ->check(CLI::Range(1, 1 << 10));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return -1;
}

/// Returns the checkpoint in the folder of a fold, or an empty path if there is none.
fs::path find_checkpoint(const fs::path& fold, const Options& options) {
  std::vector<std::string> names{"checkpoint_final.pth", "checkpoint_final.safetensors", "checkpoint_best.pth"};
  if (!options.checkpoint.empty()) names = {options.checkpoint};
  for (const std::string& name : names)
    if (fs::exists(fold / name)) return fold / name;
  return {};
}

/// Returns the checkpoints of the selected folds. By default, these are all folds fold_N with a checkpoint or, if there
/// are none, fold_all.
std::vector<fs::path> fold_files(const fs::path& model, const Options& options) {
  vg::check(fs::is_directory(model), "predict", "the model folder '", model.string(), "' does not exist");
  const std::string missing = options.checkpoint.empty() ? "a checkpoint" : options.checkpoint;
  std::vector<fs::path> files;
  for (const std::string& fold : options.folds) {
    const fs::path folder = model / ("fold_" + fold);
    vg::check(fs::is_directory(folder), "predict", "fold ", fold, ": '", folder.string(), "' does not exist");
    files.push_back(find_checkpoint(folder, options));
    vg::check(!files.back().empty(), "predict", "fold ", fold, ": '", folder.string(), "' does not have ", missing);
  }
  if (!files.empty()) return files;
  for (const fs::directory_entry& entry : fs::directory_iterator(model)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("fold_") || name == "fold_all") continue;
    if (const fs::path file = find_checkpoint(entry.path(), options); !file.empty()) files.push_back(file);
  }
  std::ranges::sort(files);
  if (files.empty()) files.push_back(find_checkpoint(model / "fold_all", options));
  vg::check(!files[0].empty(), "predict", "'", model.string(), "' has no folder fold_N with ", missing);
  return files;
}

/// The model, ready for prediction.
struct Model {
  ModelPlan plan;
  vg::Axes mirror_axes;
  std::vector<nnunet::Network> networks;  // one per fold
};

Model load_model(const Options& options, vg::Device device) {
  const fs::path folder = options.paths.front();
  Model model;
  for (const fs::path& file : fold_files(folder, options)) {
    const Checkpoint checkpoint(file);
    if (model.networks.empty()) {
      model.plan = nnunet::read_plan(folder / "dataset.json", folder / "plans.json", checkpoint.configuration);
      if (options.mirroring) model.mirror_axes = checkpoint.mirror_axes;
    }
    model.networks.push_back(checkpoint.network(model.plan));
    model.networks.back().module->to(device);
  }
  return model;
}

/// Returns the mean of the logits of all folds.
vg::Tensor predict_all(const vg::Tensor& image, const Model& model, nnunet::PredictOptions options) {
  vg::Tensor sum;
  int64_t previous = 0;
  const int64_t folds = std::ssize(model.networks);
  examples::Progress progress(0, 0, "window");
  for (const nnunet::Network& network : model.networks) {
    options.progress = [&](int64_t done, int64_t total) {
      progress.set_total(folds * total);
      progress.update(previous * total + done, "");
      return true;
    };
    const vg::Tensor logits = nnunet::predict_logits(image, network, model.plan, model.mirror_axes, options);
    if (sum.defined())
      sum.add_(logits);
    else
      sum = logits;
    ++previous;
  }
  return folds == 1 ? sum : sum / static_cast<double>(folds);
}

/// Returns the averaged logits, on the device of the network. If the memory of the device is too small for the sums of
/// the logits, stores the sums and the result on the CPU.
vg::Tensor logits_of(const vg::Tensor& image, const Model& model, nnunet::PredictOptions settings) {
  const auto predict_on = [&](vg::Device sums) {
    settings.sums = sums;
    return predict_all(image.to(sums), model, settings);
  };
  try {
    return predict_on(settings.device);
  } catch (const vg::OutOfMemoryError&) {
    if (settings.device.is_cpu()) throw;
  }
  vg::memory::empty_cache(settings.device);
  return predict_on(vg::Device::cpu());
}

/// Prints the volume of each class or region. `labels` is u8 or i32 on the CPU.
void print_volumes(const vg::Tensor& labels, const nnunet::Geometry& geometry, const nnunet::Labels& names) {
  const double voxel = geometry.spacing[0] * geometry.spacing[1] * geometry.spacing[2] / 1000;  // ml
  std::vector<int64_t> counts(1 << 16);
  const vg::Tensor numbers = labels.to(vg::i32);
  for (const int32_t label : std::span(numbers.data<int32_t>(), static_cast<size_t>(numbers.numel())))
    ++counts[static_cast<size_t>(label)];
  for (size_t i = 0; i < names.names.size(); ++i) {
    if (!names.regions && i == 0) continue;
    int64_t count = 0;
    for (const int64_t label : names.parts[i]) count += counts[static_cast<size_t>(label)];
    std::printf("  %-24s %12.2f ml\n", names.names[i].c_str(), static_cast<double>(count) * voxel);
  }
}

/// Writes a result in the geometry of the input.
void save(const fs::path& path, const vg::Tensor& data, const nnunet::Geometry& geometry) {
  if (path.has_parent_path()) examples::create_folder(path.parent_path());
  vg::save_nifti(path, {data, geometry.spacing, geometry.affine, {}});
}

void save_intermediate(const fs::path& folder, const predict::Job& job, const vg::Tensor& image,
                       const vg::Tensor& logits) {
  examples::create_folder(folder);
  vg::save_npy(folder / (job.name + "_preprocessed.npy"), image);
  vg::save_npy(folder / (job.name + "_logits.npy"), logits);
}

/// Writes a picture next to the label map. Loads the image again, because run_job() releases the image early.
void write_picture(const predict::Job& job, const vg::Tensor& labels, const nnunet::Labels& names) {
  const nnunet::Case input = nnunet::load_case(job.name, {job.images[0]});
  examples::Overlays overlays{.image = input.image[0], .labels = labels, .names = {}};
  for (size_t i = 0; i < names.names.size(); ++i) {
    if (names.values[i] == 0) continue;
    overlays.names.emplace_back(names.values[i], names.names[i]);
    overlays.centered.push_back(names.values[i]);
  }
  examples::write_overlays(predict::beside(job, ".png"), overlays);
}

void run_job(const predict::Job& job, const Model& model, const Options& options,
             const nnunet::PredictOptions& settings) {
  // Release each tensor when it is no longer needed, because a volume can take most of the memory.
  nnunet::Case input = nnunet::load_case(job.name, job.images);
  nnunet::OrientedImage oriented = nnunet::orient(input.image, input.geometry, model.plan);
  input.image = {};
  nnunet::PreparedImage prepared = nnunet::prepare(oriented, model.plan);
  oriented.image = {};
  vg::memory::empty_cache();
  const vg::Tensor logits = logits_of(prepared.image, model, settings);
  if (!options.intermediate.empty()) save_intermediate(options.intermediate, job, prepared.image, logits);
  prepared.image = {};
  vg::memory::empty_cache();
  const vg::Tensor labels = nnunet::unorient(nnunet::labels_of(logits, prepared, model.plan), oriented);
  if (options.probabilities)
    save(predict::beside(job, "_probabilities.nii.gz"),
         nnunet::unorient(nnunet::probabilities_of(logits, prepared, model.plan), oriented), input.geometry);
  save(job.output, labels, input.geometry);
  if (options.picture) write_picture(job, labels, model.plan.labels);
  std::printf("%s -> %s\n", job.name.c_str(), job.output.c_str());
  print_volumes(labels, input.geometry, model.plan.labels);
}

int run(const Options& options) {
  if (options.threads > 0) vg::set_num_threads(options.threads);
  const vg::Device device = examples::device_of(options.device);
  vg::runtime(device).require(device.index);
  const std::string precision = !options.precision.empty() ? options.precision : device.is_cpu() ? "highest" : "f16";
  const examples::Precision arithmetic(precision);
  arithmetic.set_float32();
  nnunet::PredictOptions settings{.step = options.step,
                                  .gaussian = options.gaussian,
                                  .half_accumulation = options.half_accumulation,
                                  .device = device,
                                  .autocast = arithmetic.half()};
  const Model model = load_model(options, device);
  const std::vector<fs::path> inputs(options.paths.begin() + 1, options.paths.end() - 1);
  const std::vector<predict::Job> jobs =
      predict::list_jobs(inputs, options.paths.back(), model.plan.channels.size(), model.plan.file_ending);
  for (const predict::Job& job : jobs) run_job(job, model, options, settings);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("predict", argc, argv, parse, run); }
