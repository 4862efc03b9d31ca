// 3-D super-resolution of brain MRI. Trains on one part of a human head and tests on the rest of the head and on the
// head of a macaque.
//
//   superres                        trains on a scan of Debian's package mricron-data
//   superres --volume head.nii.gz   trains on the scan head.nii.gz
//   superres --phantom              trains on a synthetic head
//   superres --resume               continues a stopped run
//
// Results are written to out/superres.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "examples/common/options.h"
#include "examples/common/output.h"
#include "examples/common/profile.h"
#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/common/ranks.h"
#include "examples/common/sample_data.h"
#include "examples/superres/pictures.h"
#include "examples/superres/report.h"
#include "examples/superres/train.h"
#include "examples/superres/volume.h"

namespace {
namespace vg = voxgrad;
using namespace superres;

struct Options {
  std::string volume;
  std::string test_volume;
  std::string out = "out/superres";
  std::string device = "auto";
  bool phantom = false;
  bool resume = false;
  int gpus = 0;
  TrainOptions train;
};

/// Returns the argument `margin` of super_resolve, in low-resolution voxels.
int64_t margin_of(const Options& options) { return options.train.patch / 5; }

/// Reads the command line. Returns -1 if the program should continue, otherwise its exit code.
int parse(int argc, char** argv, Options& options) {
  CLI::App app{"3-D super-resolution of brain MRI with voxgrad"};
  app.add_option("--volume", options.volume,
                 "NIfTI volume to train and test on (default: ch2.nii.gz of Debian's package mricron-data)")
      ->check(examples::not_empty());
  app.add_option("--test-volume", options.test_volume,
                 "NIfTI volume for a second test (default: the macaque of Debian's package mricron-data)")
      ->check(examples::not_empty());
  app.add_flag("--phantom", options.phantom, "use a 3-D Shepp-Logan phantom instead of a scan");
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
  app.add_option("--steps", train.steps, "optimizer steps")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--batch", train.batch, "patches per step (default: 8 on the CPU, 32 on a GPU)")
      ->check(CLI::Range(1, 1 << 16));  // steps * batch must not overflow
  app.add_option("--patch", train.patch, "low-resolution voxels along a patch's side")
      ->check(CLI::Range(8, 64))
      ->capture_default_str();
  app.add_option("--channels", train.model.channels, "channels of the network (1 to 4, or a multiple of 4)")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--layers", train.model.layers, "layers of the network at low resolution")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--lr", train.lr, "maximum learning rate")
      ->check(examples::number_in(1e-9, 10))
      ->capture_default_str();
  examples::add_workers_option(app, train.workers);
  examples::Precision::add_option(app, train.precision);
  examples::add_tensorboard_option(app, train.tensorboard);
  examples::StepProfiler::add_option(app, train.profile);
  app.add_option("--seed", train.seed, "seed of all random numbers")
      ->check(examples::whole_number())
      ->capture_default_str();
  try {
    app.parse(argc, argv);
    if (options.phantom && !options.volume.empty())
      throw CLI::ValidationError("--phantom and --volume exclude each other");
    examples::check_gpu_options(options.gpus, options.device, !train.profile.empty());
    if (train.model.channels > 4 && train.model.channels % 4 != 0)
      throw CLI::ValidationError("--channels must be at most 4 or a multiple of 4");
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return -1;
}

Volume main_volume(const Options& options) {
  if (options.phantom) return make_phantom(128);
  if (!options.volume.empty()) return load_volume(options.volume);
  if (const auto sample = examples::find_sample("ch2.nii.gz")) return load_volume(*sample);
  vg::fail("superres",
           "no volume found: install Debian's package mricron-data, pass a NIfTI file with --volume, or "
           "use the synthetic head of --phantom");
}

std::optional<Volume> second_volume(const Options& options) {
  if (!options.test_volume.empty()) return load_volume(options.test_volume);
  const auto sample = examples::find_sample("inia19-t1-brain.nii.gz");
  if (options.phantom || !sample) return std::nullopt;
  return load_volume(*sample);
}

/// Returns the network's prediction on the CPU.
vg::Tensor predict(const SuperResolution& model, const Options& options, const vg::Tensor& low, vg::Device device) {
  const vg::autocast guard = examples::Precision(options.train.precision).autocast();
  return super_resolve(model, low.to(device), options.train.patch, margin_of(options), options.train.batch)
      .to(vg::Device::cpu());
}

TestResult test(const SuperResolution& model, const Options& options, const std::string& name, const std::string& label,
                const vg::Tensor& truth, vg::Device device) {
  TestResult result{name, label, low_resolution(truth), truth, {}, {}, {}, {}};
  result.trilinear = SuperResolution::trilinear(result.low);
  result.network = predict(model, options, result.low, device);
  result.trilinear_score = score(result.trilinear, truth);
  result.network_score = score(result.network, truth);
  return result;
}

void print_tests(const std::vector<TestResult>& tests) {
  for (const TestResult& t : tests)
    std::printf("%s\n  PSNR %.2f dB (trilinear %.2f dB, %+.2f dB)   SSIM %.4f (trilinear %.4f)\n", t.name.c_str(),
                t.network_score.psnr, t.trilinear_score.psnr, t.network_score.psnr - t.trilinear_score.psnr,
                t.network_score.ssim, t.trilinear_score.ssim);
}

/// Writes the scores and the middle axial slices (trilinear, network, truth) of the tests to TensorBoard.
void add_tests(vg::SummaryWriter& writer, const std::vector<TestResult>& tests, int64_t step) {
  for (const TestResult& t : tests) {
    writer.add_scalar(t.label + "/PSNR", t.network_score.psnr, step);
    writer.add_scalar(t.label + "/SSIM", t.network_score.ssim, step);
    const vg::Tensor slices = vg::cat({t.trilinear, t.network, t.truth}, 4);
    // The flip puts the front of the head at the top.
    writer.add_image(t.label, vg::flip(slices.select(2, slices.size(2) / 2)[0], {1}), step);
  }
}

/// Halves the resolution of the volume, predicts the original resolution, and writes the prediction as a NIfTI file.
void save_volume(const std::filesystem::path& path, const Volume& volume, const SuperResolution& model,
                 const Options& options, vg::Device device) {
  const vg::Tensor low = low_resolution(slab(volume, 0, volume.data().size(0)));
  vg::NiftiImage image = volume.image;
  image.data = predict(model, options, low, device).reshape(volume.data().shape());
  image.descrip = "super-resolved by voxgrad from half the resolution";
  vg::save_nifti(path, image);
}

int run(const Options& options) {
  if (options.gpus > 0) vg::distributed::set_environment();
  const vg::Device device = examples::device_of(options.device);
  vg::runtime(device).require(device.index);
  Options settled = options;
  if (settled.train.batch == 0) settled.train.batch = device.is_cuda() ? 32 : 8;
  if (settled.train.workers < 0) settled.train.workers = examples::default_workers(device, options.gpus);
  examples::check_gpus("superres", options.gpus, settled.train.batch);

  const Volume volume = main_volume(options);
  const std::optional<Volume> second = second_volume(options);
  const char* result_volume = volume.phantom ? "phantom-superres.nii.gz" : "superres.nii.gz";
  const examples::OutputFolder folder(options.out);
  const std::filesystem::path& out = folder.path();
  for (const char* name : {"checkpoint.safetensors", "losses.csv", "losses.png", "held-out.png", "second-volume.png",
                           result_volume, "model.safetensors", "report.md"})
    folder.check_writable(name);  // fail before the training, not after it

  const int64_t slices = volume.data().size(0), split = slices / 3 * 2 / 2 * 2;
  const std::string held_out = vg::concat("slices ", split, "-", slices - 1);
  const std::string precision = examples::Precision(options.train.precision).text(device);
  std::printf("%s %s: training on slices 0-%lld, testing on %s, in %s\n", volume.name.c_str(),
              vg::concat(volume.data().shape()).c_str(), static_cast<long long>(split - 1), held_out.c_str(),
              precision.c_str());
  if (volume.phantom) std::printf("This is a phantom, not a scan; its scores do not apply to real heads.\n");

  RunSummary summary;
  const vg::Tensor lower = volume.data().narrow(0, 0, split);
  const TrainResult trained = examples::train_on(options.gpus, [&](vg::distributed::Communicator* world) {
    return train(lower, settled.train, world ? world->device() : device, out, options.resume, world);
  });
  if (trained.interrupted) return examples::report_stop(trained.steps, out / "checkpoint.safetensors");

  const auto begin = std::chrono::steady_clock::now();
  const SuperResolution& model = *trained.model;
  const std::string mark = volume.phantom ? " (phantom)" : "";
  summary.tests.push_back(test(model, settled, volume.name + mark + ", " + held_out + " (held out)", "held-out",
                               slab(volume, split, slices), device));
  if (second)
    summary.tests.push_back(test(model, settled, second->name + " (never trained on)", "second-volume",
                                 slab(*second, 0, second->data().size(0)), device));
  summary.test_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print_tests(summary.tests);
  if (trained.writer) add_tests(*trained.writer, summary.tests, trained.steps);

  summary.title = volume.phantom ? "Super-resolution of the Shepp-Logan phantom (not a scan)"
                                 : "Super-resolution of " + volume.name;
  summary.training = vg::concat(volume.name, mark, ", slices 0-", split - 1);
  summary.device = vg::concat(device, " in ", precision);
  for (const vg::Tensor& p : model.parameters()) summary.parameters += p.numel();
  summary.steps = trained.steps;
  summary.batch = settled.train.batch;
  summary.patch = settled.train.patch;
  summary.train_seconds = trained.seconds;
  summary.last_loss = trained.last_loss;
  summary.losses = read_losses(out / "losses.csv");
  for (const TestResult& t : summary.tests) write_slices(out / (t.label + ".png"), t);
  if (!summary.losses.empty()) write_loss_curve(out / "losses.png", summary.losses);
  save_volume(out / result_volume, volume, model, settled, device);
  vg::save_safetensors(out / "model.safetensors", model.state_dict());
  write_report(out / "report.md", summary);
  std::printf("trained in %s; pictures, report, volume and checkpoint are in %s\n",
              examples::clock_text(trained.seconds).c_str(), out.string().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("superres", argc, argv, parse, run); }
