// Writes losses.csv and the report of a run.
#include "examples/superres/report.h"

#include <array>
#include <cstdio>
#include <fstream>

#include "core/io/atomic_file.h"

namespace superres {
namespace vg = voxgrad;
namespace {

std::string format(const char* pattern, auto... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

}  // namespace

void write_losses(const std::filesystem::path& path, const std::vector<LossLine>& lines) {
  std::string text = "step,loss,learning_rate\n";
  for (const LossLine& line : lines)
    text += format("%lld,%.9g,%.9g\n", static_cast<long long>(line.step), line.loss, line.lr);
  vg::write_file(path, text, "write_losses");
}

std::vector<LossLine> read_losses(const std::filesystem::path& path) {
  std::vector<LossLine> lines;
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  while (std::getline(file, text)) {
    long long step = 0;
    LossLine line{};
    if (std::sscanf(text.c_str(), "%lld,%lf,%lf", &step, &line.loss, &line.lr) != 3) break;
    line.step = step;
    lines.push_back(line);
  }
  return lines;
}

void write_report(const std::filesystem::path& path, const RunSummary& run) {
  std::string text = "# " + run.title + "\n\n";
  text +=
      "The input is the 2 x 2 x 2 box average of each volume; the network doubles its resolution. PSNR and SSIM are "
      "computed over the voxels above 5 % of the maximum. No voxel of the tests was used for training.\n\n";
  text += "| test | trilinear PSNR (dB) | network | gain | trilinear SSIM | network |\n|---|---|---|---|---|---|\n";
  for (const TestResult& test : run.tests)
    text += format("| %s | %.2f | %.2f | **%+.2f** | %.4f | %.4f |\n", test.name.c_str(), test.trilinear_score.psnr,
                   test.network_score.psnr, test.network_score.psnr - test.trilinear_score.psnr,
                   test.trilinear_score.ssim, test.network_score.ssim);
  text += format(
      "\nTrained on %s for %lld %s of %lld %s of %lld^3 voxels in %.1f s on %s (%lld parameters; mean training loss of "
      "the last 20 steps: %.3g). The tests took %.1f s. Training losses: [losses.csv](losses.csv).\n",
      run.training.c_str(), static_cast<long long>(run.steps), run.steps == 1 ? "step" : "steps",
      static_cast<long long>(run.batch), run.batch == 1 ? "patch" : "patches", static_cast<long long>(run.patch),
      run.train_seconds, run.device.c_str(), static_cast<long long>(run.parameters), run.last_loss, run.test_seconds);
  if (!run.losses.empty()) text += "\n![losses](losses.png)\n";
  for (const TestResult& test : run.tests)
    text +=
        "\n## " + test.name +
        "\n\nThe picture shows the middle axial, coronal and sagittal slices. The subject's right is on the right; in "
        "the sagittal slice, the front is on the right. The last column shows the network's error, amplified five "
        "times.\n\n"
        "![slices](" +
        test.label + ".png)\n";
  vg::write_file(path, text, "write_report");
}

}  // namespace superres
