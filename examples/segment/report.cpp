// Writes the report of a run.
#include "examples/segment/report.h"

#include <cctype>
#include <cmath>

#include "core/io/atomic_file.h"
#include "examples/segment/evaluate.h"

namespace segment {
namespace vg = voxgrad;
namespace {

std::string cell(double dice) { return std::isnan(dice) ? "absent" : fixed(dice, 3); }

}  // namespace

std::string dice_table(const Task& task, const TestResult& test) {
  const bool compares = !test.baseline.empty();
  std::string text =
      "| structure | Dice |" + (compares ? " " + task.baseline_name + " |" : std::string()) + "\n|---|---|";
  text += compares ? "---|\n" : "\n";
  for (const int64_t c : task.scored) {
    const auto i = static_cast<size_t>(c);
    text += "| " + task.classes[i] + " | " + cell(test.dice[i]) + " |";
    text += compares ? " " + cell(test.baseline[i]) + " |\n" : "\n";
  }
  text += "| **mean** | **" + cell(mean_dice(test.dice, task.scored)) + "** |";
  text += compares ? " " + cell(mean_dice(test.baseline, task.scored)) + " |\n" : "\n";
  return text;
}

std::string title(const Task& task, const TestResult& test) { return test.name + " (" + task.predicted_as + ")"; }

std::string file_name(const std::string& name) {
  std::string text;
  for (const char c : name) text += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
  return text;
}

void write_report(const std::filesystem::path& path, const Task& task, const TrainResult& trained,
                  const std::vector<TestResult>& tests, const std::string& device) {
  int64_t parameters = 0;
  for (const vg::Tensor& p : trained.network.module->parameters()) parameters += p.numel();
  std::string text = "# Segmentation: " + task.name + "\n\n";
  text += vg::concat("Trained on ", task.training.size(), task.training.size() == 1 ? " case" : " cases", " for ",
                     trained.steps, trained.steps == 1 ? " step in " : " steps in ", fixed(trained.seconds, 1),
                     " s on ", device, ": a network with ", parameters, " parameters, on patches of ",
                     trained.plan.patch_size, " voxels with a spacing of ", fixed(trained.plan.spacing[0], 2), " x ",
                     fixed(trained.plan.spacing[1], 2), " x ", fixed(trained.plan.spacing[2], 2), " mm. Validated on ",
                     task.validated_on,
                     ". The Dice coefficients below exclude voxels whose labels were used for training.\n\n");
  for (const TestResult& test : tests) {
    if (test.dice.empty()) continue;
    text += "## " + title(task, test) + "\n\n" + dice_table(task, test) + "\n![slices](" + file_name(test.name) +
            ".png)\n\n";
  }
  text +=
      "## Training\n\n[history.csv](history.csv) contains the training loss of each step and the mean Dice of the "
      "validation data. The Dice does not influence the training, except that `--patience` stops the training when the "
      "Dice no longer rises.\n\n![curves](curves.png)\n";
  vg::write_file(path, text, "write_report");
}

}  // namespace segment
