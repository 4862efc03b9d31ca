// Segments volumes with a model that nnU-Net v2 trained.
//
//   predict MODEL_FOLDER INPUT... OUTPUT
//   predict Dataset004/nnUNetTrainer__nnUNetPlans__3d_fullres imagesTs labels --folds 0 1 2 3 4
//
// MODEL_FOLDER contains dataset.json, plans.json and fold_0/checkpoint_final.pth, which are read without Python. INPUT
// is a folder, or one NIfTI file per channel.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "examples/common/options.h"
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
  std::string checkpoint = "checkpoint_final.pth", device = "auto", precision, steps;
  double step = 0.5;
  int threads = 0;
  bool mirroring = true, gaussian = true, probabilities = false, half_accumulation = false;
};

/// Reads the command line. Returns the exit code if the program ends here, otherwise -1.
int parse(int argc, char** argv, Options& options) {
  CLI::App app{"Segments volumes with a model that nnU-Net v2 trained"};
  app.add_option("paths", options.paths,
                 "the model folder; one NIfTI file per channel, or a folder with files CASE_0000.nii.gz; the file or "
                 "folder for the label maps")
      ->required()
      ->expected(3, 1 << 14)
      ->option_text("MODEL_FOLDER INPUT... OUTPUT");
  app.add_option("--folds", options.folds, "folds whose logits are averaged (default: all folds of the model folder)");
  app.add_option("--checkpoint", options.checkpoint, "file name in the folders of the folds")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")
      ->check(examples::device_name())
      ->capture_default_str();
  examples::Precision::add_option(app, options.precision, "; default: highest on the CPU, f16 on a GPU");
  app.add_option("--step", options.step, "distance of neighboring windows, relative to their size")
      ->check(examples::number_in(0.01, 1))
      ->capture_default_str();
  app.add_flag("!--no-mirroring", options.mirroring, "do not average over mirrored windows; up to 8 times as fast");
  app.add_flag("!--no-gaussian", options.gaussian, "weight all voxels of a window equally");
  app.add_flag("--half-accumulation", options.half_accumulation,
               "round sums to f16 as nnU-Net does, to reproduce its labels exactly");
  app.add_flag("--probabilities", options.probabilities, "also write CASE_probabilities.nii.gz");
  app.add_option("--intermediate", options.steps,
                 "folder for CASE_preprocessed.npy and CASE_logits.npy: the network's input and the averaged logits")
      ->check(examples::not_empty());
  app.add_option("--threads", options.threads, "number of CPU threads (default: one per core)")
      ->check(CLI::Range(1, 1 << 10));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return -1;
}

/// Returns the folders of the folds: those of the option, or all folders fold_* that have the checkpoint.
std::vector<fs::path> fold_files(const fs::path& model, const Options& options) {
  std::vector<fs::path> files;
  for (const std::string& fold : options.folds) {
    files.push_back(model / ("fold_" + fold) / options.checkpoint);
    vg::check(fs::exists(files.back()), "predict", "fold ", fold, ": '", files.back().string(), "' does not exist");
  }
  if (!files.empty()) return files;
  vg::check(fs::is_directory(model), "predict", "the model folder '", model.string(), "' does not exist");
  for (const fs::directory_entry& entry : fs::directory_iterator(model)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("fold_") && name != "fold_all" && fs::exists(entry.path() / options.checkpoint))
      files.push_back(entry.path() / options.checkpoint);
  }
  std::ranges::sort(files);
  vg::check(!files.empty(), "predict", "'", model.string(), "' has no fold_N/", options.checkpoint);
  return files;
}

/// The model, ready for prediction.
struct Model {
  ModelPlan plan;
  vg::Axes mirror_axes;
  std::vector<std::shared_ptr<vg::nn::UNet>> networks;  // one per fold
};

Model load_model(const Options& options, vg::Device device) {
  const fs::path folder = options.paths.front();
  Model model;
  for (const fs::path& file : fold_files(folder, options)) {
    const Checkpoint checkpoint(file);
    if (model.networks.empty()) {
      model.plan = nnunet::read_plan(folder, checkpoint.configuration);
      if (options.mirroring) model.mirror_axes = checkpoint.mirror_axes;
    }
    model.networks.push_back(checkpoint.network(model.plan));
    model.networks.back()->to(device);
  }
  return model;
}

/// Returns the mean of the logits of all folds.
vg::Tensor predict_all(const vg::Tensor& image, const Model& model, nnunet::PredictOptions options) {
  vg::Tensor sum;
  int64_t previous = 0;
  const int64_t folds = std::ssize(model.networks);
  std::optional<examples::Progress> progress;
  for (const auto& network : model.networks) {
    options.progress = [&](int64_t done, int64_t total) {
      if (!progress) progress.emplace(0, folds * total, "window");
      progress->update(previous * total + done, "");
      return true;
    };
    const vg::Tensor logits = nnunet::predict_logits(image, *network, model.plan, model.mirror_axes, options);
    sum = sum.defined() ? sum + logits : logits;
    ++previous;
  }
  return folds == 1 ? sum : sum / static_cast<double>(folds);
}

/// Prints the volume of each class.
void print_volumes(const vg::Tensor& labels, const nnunet::Geometry& geometry, const nnunet::Labels& names) {
  const double voxel = geometry.spacing[0] * geometry.spacing[1] * geometry.spacing[2] / 1000;  // ml
  for (size_t i = 0; i < names.names.size(); ++i) {
    if (names.values[i] == 0) continue;
    const double count = vg::sum(vg::eq(labels, static_cast<double>(names.values[i])).to(vg::i64)).item();
    std::printf("  %-24s %12.2f ml\n", names.names[i].c_str(), count * voxel);
  }
}

void run_job(const predict::Job& job, const Model& model, const Options& options, nnunet::PredictOptions settings) {
  const nnunet::Case input = nnunet::load_case(job.name, job.images);
  const nnunet::OrientedImage oriented = nnunet::orient(input.image, input.geometry, model.plan);
  const nnunet::PreparedImage prepared = nnunet::prepare(oriented, model.plan);
  const auto predict_on = [&](vg::Device sums) {
    settings.sums = sums;
    return predict_all(prepared.image.to(sums), model, settings);
  };
  vg::Tensor logits;
  try {
    logits = predict_on(settings.device);
  } catch (const vg::OutOfMemoryError&) {
    if (settings.device.is_cpu()) throw;
    logits = predict_on(vg::Device::cpu());  // the logits of all classes do not fit on the GPU
  }
  if (!options.steps.empty()) {
    fs::create_directories(options.steps);
    vg::save_npy(fs::path(options.steps) / (job.name + "_preprocessed.npy"), prepared.image);
    vg::save_npy(fs::path(options.steps) / (job.name + "_logits.npy"), logits);
  }
  const vg::Tensor labels = nnunet::unorient(nnunet::labels_of(logits, prepared, model.plan), oriented);
  const vg::NiftiImage like{{}, input.geometry.spacing, input.geometry.affine, {}};
  const auto save = [&](const fs::path& path, const vg::Tensor& data) {
    vg::NiftiImage image = like;
    image.data = data;
    vg::save_nifti(path, image);
  };
  if (options.probabilities)
    save(predict::probabilities_path(job),
         nnunet::unorient(nnunet::probabilities_of(logits, prepared, model.plan), oriented));
  save(job.output, labels);
  std::printf("%s -> %s\n", job.name.c_str(), job.output.c_str());
  print_volumes(labels, input.geometry, model.plan.labels);
}

int run(const Options& options) {
  if (options.threads > 0) vg::set_num_threads(options.threads);
  const vg::Device device = examples::device_of(options.device);
  vg::runtime(device).require(device.index);
  const std::string precision = !options.precision.empty() ? options.precision : device.is_cpu() ? "highest" : "f16";
  examples::Precision(precision).set_float32();
  nnunet::PredictOptions settings{.step = options.step,
                                  .gaussian = options.gaussian,
                                  .half_accumulation = options.half_accumulation,
                                  .device = device};
  if (precision == "bf16" || precision == "f16") settings.autocast = vg::parse_dtype(precision);
  const Model model = load_model(options, device);
  const std::vector<fs::path> inputs(options.paths.begin() + 1, options.paths.end() - 1);
  const std::vector<predict::Job> jobs =
      predict::list_jobs(inputs, options.paths.back(), model.plan.channels.size(), model.plan.file_ending);
  for (const predict::Job& job : jobs) run_job(job, model, options, settings);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("predict", argc, argv, parse, run); }
